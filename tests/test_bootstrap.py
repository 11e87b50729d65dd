"""The bootstrap against theory and against plain resampling, one call a resample."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict
from statistics import NormalDist

import numpy as np
import pytest

from minbert.errors import MinbertError
from minbert.evaluation import bootstrap as module
from minbert.evaluation.bootstrap import Interval, bootstrap, paired_bootstrap, score
from minbert.evaluation.metrics import METRICS, Metric, accuracy, pearson, roc_auc, spearman
from tests.test_metrics import EVERY_METRIC, rng

pytestmark = pytest.mark.filterwarnings("error:::minbert")  # nothing of ours may print a warning


def rows_for(metric: Metric, rows: int = 200) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels and two outputs for them, with ties."""
    labels = rng(1).integers(0, 3, rows)
    if metric.reads == "probabilities":
        parts = rng(2).integers(1, 5, (2, rows, 3))
        return labels, *(parts / parts.sum(axis=2, keepdims=True))
    wrong = rng(3).integers(0, 3, (2, rows))
    return labels, *np.where(rng(4).random((2, rows)) < [[0.4], [0.8]], labels, wrong)


@pytest.mark.parametrize("metric", EVERY_METRIC, ids=lambda metric: metric.__name__)
def test_weights_say_the_same_as_resampled_rows(metric: Metric) -> None:
    labels, outputs, _ = rows_for(metric)
    by_weight = bootstrap(metric, labels, outputs, rng=rng(5), samples=40)
    by_row = bootstrap(lambda *rows: metric(*rows), labels, outputs, rng=rng(5), samples=40)
    assert asdict(by_weight) == pytest.approx(asdict(by_row))
    assert by_weight.value == metric(labels, outputs)


@pytest.mark.parametrize("metric", EVERY_METRIC, ids=lambda metric: metric.__name__)
def test_the_same_seed_gives_the_same_interval_whatever_the_block(
    metric: Metric, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels, a, b = rows_for(metric)
    single = bootstrap(metric, labels, a, rng=rng(5), samples=50)
    paired = paired_bootstrap(metric, labels, a, b, rng=rng(5), samples=50)
    assert bootstrap(metric, labels, a, rng=rng(5), samples=50) == single
    assert bootstrap(metric, labels, a, rng=rng(6), samples=50) != single
    monkeypatch.setattr(module, "COUNTS_PER_BLOCK", 7 * len(labels))
    assert asdict(bootstrap(metric, labels, a, rng=rng(5), samples=50)) == pytest.approx(asdict(single))
    assert paired_bootstrap(metric, labels, a, b, rng=rng(5), samples=50).p_value == paired.p_value


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_interval_is_near_the_normal_one(level: float) -> None:
    rows, z = 4000, NormalDist().inv_cdf((1 + level) / 2)
    labels = np.zeros(rows, dtype=int)
    predictions = (rng(1).random(rows) < 0.3).astype(int)
    found = bootstrap(accuracy, labels, predictions, rng=rng(), samples=2500, level=level)
    half = z * math.sqrt(found.value * (1 - found.value) / rows)
    assert (found.value - found.low, found.high - found.value) == pytest.approx((half, half), rel=0.08)

    x, noise = rng(2).normal(size=(2, rows))
    found = bootstrap(pearson, x, x + noise, rng=rng(), samples=2500, level=level)
    fisher = [math.tanh(math.atanh(found.value) + side * z / math.sqrt(rows - 3)) for side in (-1, 1)]
    assert (found.low, found.high) == pytest.approx(fisher, abs=0.1 * (fisher[1] - fisher[0]))


def test_interval_covers_the_truth_about_as_often_as_promised() -> None:
    covered = 0
    for seed in range(300):
        x, noise = rng(seed).normal(size=(2, 150))
        found = bootstrap(pearson, x, x + noise, rng=rng(seed), samples=300)
        covered += found.low <= math.sqrt(0.5) <= found.high
    assert 0.90 <= covered / 300 <= 0.98


@pytest.mark.parametrize("metric", EVERY_METRIC, ids=lambda metric: metric.__name__)
def test_identical_predictions_do_not_differ(metric: Metric) -> None:
    labels, outputs, _ = rows_for(metric)
    result = paired_bootstrap(metric, labels, outputs, outputs.copy(), rng=rng(), samples=100)
    assert result.difference == Interval(0, 0, 0)
    assert (result.p_value, result.wins) == (1, 0.5)


def test_clearly_better_predictions_win() -> None:
    labels, worse, better = rows_for(accuracy, 500)
    result = paired_bootstrap(accuracy, labels, worse, better, rng=rng(), samples=2000)
    assert result.p_value == pytest.approx(2 / 2001)
    assert result.wins == 1
    assert result.difference.low > 0.1
    assert result.difference.value == pytest.approx(accuracy(labels, better) - accuracy(labels, worse))
    swapped = paired_bootstrap(accuracy, labels, better, worse, rng=rng(), samples=2000)
    assert swapped.wins == 0
    assert swapped.difference.high == pytest.approx(-result.difference.low)


def test_p_values_of_equally_good_predictions_are_spread_evenly() -> None:
    p_values = []
    for seed in range(200):
        right = rng(seed).random((2, 400)) < 0.7
        labels = np.ones(400, dtype=int)
        p_values.append(paired_bootstrap(accuracy, labels, *right.astype(int), rng=rng(seed), samples=400).p_value)
    assert 0.01 <= np.mean(np.array(p_values) < 0.05) <= 0.10
    assert np.mean(p_values) == pytest.approx(0.5, abs=0.08)


def test_twenty_thousand_rows_a_thousand_times() -> None:
    x, noise = rng().normal(size=(2, 20_000))
    for metric, labels, outputs in ((accuracy, x > 0, noise > 0), (pearson, x, x + noise), (spearman, x, x + noise)):
        start = time.process_time()
        bootstrap(metric, labels, outputs, rng=rng(), samples=1000)
        assert time.process_time() - start < 6  # typically 0.3 s, 0.3 s and 1.3 s


def test_interval_reads_well_and_goes_into_json() -> None:
    interval = bootstrap(accuracy, [1, 1, 1, 0], [1, 1, 1, 1], rng=rng())
    assert str(interval) == "0.750 [0.250, 1.000]"
    assert json.loads(json.dumps(asdict(interval))) == {"value": 0.75, "low": 0.25, "high": 1.0}


def test_undefined_resamples_are_left_out() -> None:
    # With one positive in four rows, a third of the resamples holds one class only
    interval = bootstrap(roc_auc, [0, 0, 0, 1], [0.1, 0.5, 0.3, 0.4], rng=rng(), samples=200)
    assert interval.value == pytest.approx(2 / 3)
    assert 0 <= interval.low < interval.high <= 1


def test_what_cannot_be_resampled_is_said() -> None:
    with pytest.raises(MinbertError, match="0 bootstrap samples asked for; expected at least 1"):
        bootstrap(accuracy, [0], [0], rng=rng(), samples=0)
    with pytest.raises(MinbertError, match=r"arrays of \[0\] rows found; expected equally many, at least one"):
        bootstrap(np.mean, [], rng=rng())


# --- scores ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", METRICS)
def test_score_gives_the_metrics_of_the_kind_each_as_bootstrapped_alone(kind: str) -> None:
    labels, probabilities, _ = rows_for(roc_auc)
    predictions = probabilities.argmax(axis=1)
    losses = rng(6).random(len(labels))
    scores = score(kind, labels, predictions, probabilities, losses=losses, rng=rng(3), samples=60)
    assert list(scores) == list(METRICS[kind])
    for name, metric in METRICS[kind].items():
        outputs = {"probabilities": probabilities, "losses": losses}.get(metric.reads, predictions)
        assert scores[name] == bootstrap(metric, labels, outputs, rng=rng(3), samples=60)


def test_score_without_probabilities_leaves_out_what_needs_them() -> None:
    scores = score("classification", [0, 1, 1], [0, 1, 0], rng=rng(), samples=10)
    assert list(scores) == ["accuracy", "macro-f1", "mean-class-accuracy"]
