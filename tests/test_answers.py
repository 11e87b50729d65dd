"""Outputs to answers: what each kind of task says, by hand and against scipy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit, softmax

from minbert.model.answers import Decision, decode, logits_of
from minbert.task_checks import check_task
from minbert.tasks import Task

quick = settings(max_examples=60, deadline=None)
logits = st.floats(-30, 30, width=32)


def classifier(count: int, **row: Any) -> Task:
    return check_task(Task("t", "classification", classes=tuple("abcdef"[:count]), **row))


def scorer(**row: Any) -> Task:
    return check_task(Task("t", "pair-regression", text2="b", **row))


def column(*values: float) -> np.ndarray:
    return np.array(values, np.float32)[:, None]


FIVE, TWO, BINARY = classifier(5), classifier(2), classifier(2, loss="bce")

# --- classes --------------------------------------------------------------------------------------------------------


@pytest.mark.parity
def test_many_classes_are_a_softmax_and_its_largest() -> None:
    raw = np.random.default_rng(0).normal(size=(20, 5)).astype(np.float32) * 3
    found = decode(FIVE, raw)
    np.testing.assert_allclose(found.probabilities, softmax(raw.astype(np.float64), axis=1), rtol=1e-12)
    assert found.predictions.tolist() == raw.argmax(1).tolist()
    assert found.predictions.dtype == np.float64


@pytest.mark.parity
def test_one_logit_is_a_sigmoid() -> None:
    raw = column(-40.0, -1.5, -0.001, 0.0, 2.0, 40.0)
    found = decode(BINARY, raw)
    assert found.probabilities is not None
    np.testing.assert_allclose(found.probabilities[:, 1], expit(raw[:, 0].astype(np.float64)), rtol=1e-12)
    np.testing.assert_allclose(found.probabilities.sum(1), 1, rtol=1e-12)
    assert found.predictions.tolist() == [0, 0, 0, 1, 1, 1]


def test_one_logit_stands_for_two() -> None:
    assert logits_of(BINARY, column(3.0)).tolist() == [[0.0, 3.0]]
    assert logits_of(TWO, np.array([[1.0, 3.0]])).tolist() == [[1.0, 3.0]]


def test_two_classes_answer_the_second_from_the_threshold_on() -> None:
    raw = column(-1.0, 0.0, 1.0, 2.0)  # probabilities 0.27, 0.5, 0.73, 0.88
    assert decode(BINARY, raw, Decision(threshold=0.5)).predictions.tolist() == [0, 1, 1, 1]
    assert decode(BINARY, raw, Decision(threshold=0.8)).predictions.tolist() == [0, 0, 0, 1]
    assert decode(BINARY, raw, Decision(threshold=0.2)).predictions.tolist() == [1, 1, 1, 1]
    wide = np.hstack([-raw / 2, raw / 2])
    assert decode(TWO, wide, Decision(threshold=0.8)).predictions.tolist() == [0, 0, 0, 1]


def test_more_than_two_classes_have_no_threshold() -> None:
    raw = np.array([[0.0, 0.1, 0.2]])
    assert decode(classifier(3), raw, Decision(threshold=0.9)).predictions.tolist() == [2]


@quick
@given(
    rows=st.lists(st.lists(logits, min_size=5, max_size=5), min_size=1, max_size=4),
    temperature=st.floats(0.1, 10),
)
def test_a_temperature_keeps_the_answer_and_changes_how_sure_it_is(rows: list[list[float]], temperature: float) -> None:
    raw = np.array(rows)
    plain, tempered = decode(FIVE, raw), decode(FIVE, raw, Decision(temperature=temperature))
    np.testing.assert_allclose(tempered.probabilities, softmax(raw / temperature, axis=1), rtol=1e-9)
    assert plain.probabilities is not None
    assert tempered.probabilities is not None
    np.testing.assert_array_equal(tempered.predictions, plain.predictions)
    for found in (plain, tempered):
        chosen = np.take_along_axis(found.probabilities, found.predictions.astype(int)[:, None], 1)  # type: ignore[arg-type]
        np.testing.assert_array_equal(chosen[:, 0], found.probabilities.max(1))  # type: ignore[union-attr]
    surer = tempered.probabilities.max(1) - plain.probabilities.max(1)
    assert (surer <= 1e-9 if temperature >= 1 else surer >= -1e-9).all()


def test_huge_logits_are_no_trouble() -> None:
    with np.errstate(over="raise", invalid="raise"):
        many = decode(FIVE, np.array([[1e4, 0, 0, 0, -1e4]]), Decision(temperature=0.1))
    assert many.probabilities is not None
    assert many.probabilities[0].tolist() == [1, 0, 0, 0, 0]


# --- scores ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["mse", "cosine-mse"])
def test_a_score_is_clipped_to_its_scale(loss: str) -> None:
    task = scorer(head="cosine", loss=loss, low=1.0, high=5.0)
    found = decode(task, column(-3.0, 1.0, 2.5, 5.0, 9.0))
    assert found.predictions.tolist() == [1, 1, 2.5, 5, 5]
    assert found.probabilities is None


def test_a_score_without_bounds_is_the_heads_own_number() -> None:
    assert decode(scorer(bounded=False), column(-3.0, 2.5, 9.0)).predictions.tolist() == [-3, 2.5, 9]


def test_an_order_is_left_as_it_is() -> None:
    assert decode(scorer(head="cosine", loss="cosent"), column(-3.0, 0.5, 9.0)).predictions.tolist() == [-3, 0.5, 9]


@pytest.mark.parity
@pytest.mark.parametrize("loss", ["bce-threshold", "sigmoid-mse"])
def test_a_sigmoid_is_laid_over_the_scale(loss: str) -> None:
    task = scorer(loss=loss, low=1.0, high=5.0)
    raw = column(-1000.0, -2.0, 0.0, 1.0, 1000.0)
    with np.errstate(over="raise", invalid="raise"):
        found = decode(task, raw).predictions
    np.testing.assert_allclose(found, 1 + 4 * expit(raw[:, 0].astype(np.float64)), rtol=1e-12)
    assert (found[0], found[2], found[-1]) == (1, 3, 5)


def test_scores_know_no_temperature() -> None:
    assert decode(scorer(), column(2.0), Decision(temperature=4.0, threshold=0.9)).predictions.tolist() == [2]


@pytest.mark.parametrize("task", [FIVE, TWO, BINARY, scorer()], ids=["many", "two", "binary", "score"])
def test_no_rows_are_no_answers(task: Task) -> None:
    found = decode(task, np.empty((0, task.outputs), np.float32))
    assert len(found.predictions) == 0
    assert found.probabilities is None or found.probabilities.shape == (0, len(task.classes))
