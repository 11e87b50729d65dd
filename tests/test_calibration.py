"""Temperatures and thresholds against a search, and worked by hand; the calibration error against a loop over bins."""

from __future__ import annotations

import time
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minbert.errors import MinbertError
from minbert.evaluation.calibration import best_threshold, expected_calibration_error, fit_temperature
from minbert.evaluation.metrics import log_loss
from tests.test_metrics import quick, rng

pytestmark = pytest.mark.filterwarnings("error:::minbert")  # nothing of ours may print a warning


def calibration_error_by_loop(probabilities: np.ndarray, labels: np.ndarray, bins: int) -> float:
    total = 0.0
    for low, high in zip(np.arange(bins) / bins, np.arange(1, bins + 1) / bins, strict=True):
        inside = (probabilities.max(axis=1) > low) & (probabilities.max(axis=1) <= high)
        if inside.any():
            right = (probabilities.argmax(axis=1) == labels)[inside].mean()
            total += inside.mean() * abs(right - probabilities.max(axis=1)[inside].mean())
    return total


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_calibration_error_agrees_with_a_loop_over_bins(bins: int) -> None:
    labels, probabilities = rng().integers(0, 3, 500), rng(1).dirichlet(np.ones(3), 500)
    expected = calibration_error_by_loop(probabilities, labels, bins)
    assert expected_calibration_error(probabilities, labels, bins) == pytest.approx(expected)


def test_calibration_error_worked_by_hand() -> None:
    # Two rows at 0.9, one of them right: a gap of 0.4. Two at 0.6, both right: a gap of 0.4. Of 4 rows: 0.4
    probabilities = np.array([0.9, 0.9, 0.4, 0.4])
    assert expected_calibration_error(probabilities, [1, 0, 0, 0]) == pytest.approx(0.4)
    assert expected_calibration_error([1.0, 0.0], [1, 0]) == 0


def softmax(logits: np.ndarray) -> np.ndarray:
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(odds / odds.sum(axis=1, keepdims=True))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("classes", [2, 5])
def test_temperature_is_the_best_by_search_and_near_the_true_one(temperature: float, classes: int) -> None:
    true = rng().normal(size=(4000, classes)) * 2
    labels = (softmax(true).cumsum(axis=1) < rng(1).random((4000, 1))).sum(axis=1).clip(max=classes - 1)
    logits = true * temperature
    found = fit_temperature(logits, labels)
    assert found == pytest.approx(temperature, rel=0.1)
    tried = found * np.exp(np.linspace(-1, 1, 201))  # the middle one is what was found
    assert np.argmin([log_loss(labels, softmax(logits / each)) for each in tried]) == 100
    if classes == 2:
        assert fit_temperature(logits[:, 1] - logits[:, 0], labels) == pytest.approx(found, rel=1e-9)


def test_temperature_of_degenerate_logits_stays_within_its_bounds() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fit_temperature([2.0, -1.0], [1, 0]) == pytest.approx(0.01)
        assert fit_temperature([2.0, -1.0], [0, 1]) == pytest.approx(100)
        assert fit_temperature([[0.1, 0.1, 0.1]], [2]) == 1
        assert 0.01 <= fit_temperature([[1e4, 0.0], [0.0, 1e4]], [0, 0]) <= 100


@quick
@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.1, 0.3, 0.5, np.nextafter(0.5, 1), 0.8, 1.0]), st.integers(0, 1)), min_size=1
    )
)
def test_threshold_is_the_best_by_search(rows: list[tuple[float, int]]) -> None:
    probabilities, labels = (np.array(column) for column in zip(*rows, strict=True))
    found = best_threshold(probabilities, labels)
    right = {t: np.mean((probabilities >= t) == labels) for t in [*probabilities, 1.1, found]}
    assert right[found] == max(right.values())
    assert found == best_threshold(np.stack([1 - probabilities, probabilities], axis=1), labels)
    assert 0 <= found <= np.nextafter(1, 2)


@pytest.mark.parametrize(
    ("probabilities", "labels", "expected"),
    [
        ([0.2, 0.4, 0.8], [0, 0, 1], 0.6),
        ([0.1, 0.2, 0.6, 0.9], [0, 1, 0, 1], 0.75),  # equally good: 0.15 and 0.75; the latter is nearer to 0.5
        ([0.6, 0.8], [1, 1], 0.3),
        ([0.2, 0.4], [0, 0], 0.7),
        ([0.0, 0.4], [1, 1], 0.0),
    ],
)
def test_threshold_worked_by_hand(probabilities: list[float], labels: list[int], expected: float) -> None:
    assert best_threshold(probabilities, labels) == pytest.approx(expected)


def test_threshold_of_many_rows_is_quick() -> None:
    probabilities = rng().random(200_000)
    labels = (rng(1).random(200_000) < probabilities).astype(int)
    start = time.process_time()
    assert best_threshold(probabilities, labels) == pytest.approx(0.5, abs=0.03)
    assert time.process_time() - start < 2


def test_a_threshold_is_for_two_classes() -> None:
    with pytest.raises(MinbertError, match="probabilities of 3 classes found; a threshold is for 2"):
        best_threshold([[0.2, 0.3, 0.5]], [0])
