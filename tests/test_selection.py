"""Which model is kept and when a run stops: the rules worked by hand, and on random scores."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minbert.config import TrainingConfig
from minbert.tasks import Task
from minbert.training.selection import Selection

# Evaluations of two tasks, one after another.
SCORES = [
    {"a": 0.5, "b": 0.5},  # the first is always kept
    {"a": 0.9, "b": 0.0},  # a rises, the mean falls
    {"a": 0.6, "b": 0.6},  # the mean rises, a is below its best
    {"a": 0.1, "b": 0.7},  # b rises
    {"a": 0.6, "b": 0.6},  # as good as the best so far is not better
]
MODEL, A, B = "model", "models/a", "models/b"
TASKS = {
    **{name: Task(name, "classification") for name in "ab"},
    "near": Task("near", "contrastive"),
    "hidden": Task("hidden", "masked"),
}


def select(scores: list[dict[str, float]], **config: Any) -> list[list[str]]:
    selection = Selection(TrainingConfig(**config), TASKS)
    return [selection.update(one) for one in scores]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"best": "mean"}, [[MODEL], [], [MODEL], [], []]),
        ({"best": "weighted-mean"}, [[MODEL], [], [MODEL], [], []]),  # without weights it is the mean
        ({"best": "weighted-mean", "best_weights": {"a": 3.0}}, [[MODEL], [MODEL], [], [], []]),  # .5 .675 .6 .25 .6
        ({"best": "weighted-mean", "best_weights": {"a": 0.0}}, [[MODEL], [], [MODEL], [MODEL], []]),  # b alone
        ({"best": "task", "best_task": "b"}, [[MODEL], [], [MODEL], [MODEL], []]),
        ({"best": "any-improves"}, [[MODEL]] * 5),  # the last: a is above the .1 of the model before it
        ({"best": "per-task"}, [[MODEL, A, B], [A], [MODEL, B], [B], []]),
        ({"best": "last"}, [[MODEL], [MODEL], [MODEL], [MODEL], [MODEL]]),
    ],
)
def test_rules(config: dict[str, Any], expected: list[list[str]]) -> None:
    assert select(SCORES, **config) == expected


@pytest.mark.parametrize(
    ("config", "aggregate"),
    [
        ({"best": "mean"}, 0.5),
        ({"best": "any-improves"}, 0.5),
        ({"best": "per-task"}, 0.5),
        ({"best": "last"}, 0.5),
        ({"best": "weighted-mean", "best_weights": {"a": 3.0}}, (3 * 0.8 + 0.2) / 4),
        ({"best": "task", "best_task": "b"}, 0.2),
    ],
)
def test_aggregate(config: dict[str, Any], aggregate: float) -> None:
    assert Selection(TrainingConfig(**config), TASKS).aggregate({"a": 0.8, "b": 0.2}) == pytest.approx(aggregate)


def test_a_task_that_is_a_means_does_not_choose() -> None:
    """It has an `overall` that leaves it out, so it must not decide which model has the best one either."""
    selection = Selection(TrainingConfig(), TASKS)
    assert selection.aggregate({"a": 0.5, "b": 0.3, "near": 1.0, "hidden": 0.9}) == pytest.approx(0.4)
    assert selection.aggregate({"near": 1.0, "hidden": 0.5}) == pytest.approx(0.75), "there is no other"
    weighted = Selection(TrainingConfig(best="weighted-mean", best_weights={"near": 1.0, "b": 0.0}), TASKS)
    assert weighted.aggregate({"a": 0.5, "b": 0.3, "near": 1.0, "hidden": 0.9}) == pytest.approx(0.75), "it is named"


def test_any_improves_keeps_a_model_though_no_score_exists() -> None:
    """All answers are the same, say: the run has a model in the end, as with every other rule."""
    selection = Selection(TrainingConfig(best="any-improves"), TASKS)
    assert [selection.update({"a": math.nan}) for _ in range(2)] == [[MODEL], []]
    assert selection.update({"a": -0.5}) == [MODEL]


def test_any_improves_compares_with_the_model_that_is_kept() -> None:
    """Not with each task's best ever, nor with the evaluation before, if that was not kept."""
    selection = Selection(TrainingConfig(best="any-improves"), TASKS)
    assert selection.update({"a": 0.9, "b": 0.1}) == [MODEL]
    assert selection.update({"a": 0.2, "b": 0.5}) == [MODEL]  # b improves; now .2 and .5 are to be beaten
    assert selection.update({"a": 0.1, "b": 0.4}) == []
    assert selection.update({"a": 0.2, "b": 0.45}) == []  # better than the one before, which was not kept
    assert selection.update({"a": 0.3, "b": 0.0}) == [MODEL]  # far from the best a, but above the kept one's
    assert selection.update({"a": math.nan, "b": 0.1}) == [MODEL]
    assert selection.update({"a": -0.9, "b": 0.1}) == [MODEL], "any number is better than none"
    assert selection.best["*"] == 0.5
    json.dumps(selection.state(), allow_nan=False)


def test_snapshots_are_the_best_aggregates_and_of_equals_the_earlier() -> None:
    selection = Selection(TrainingConfig(snapshots=2), TASKS)
    kept = [selection.snapshot(step, {"a": score}) for step, score in enumerate((0.5, 0.2, 0.5, 0.5, math.nan, 0.9), 1)]
    names = [f"models/step-0000000{step}" for step in (1, 2, 3, 6)]
    assert kept == [*names[:3], None, None, names[3]]
    assert list(selection.snapshots) == [6, 1]
    assert selection.snapshots[6] == {"aggregate": 0.9, "scores": {"a": 0.9}}
    assert Selection(TrainingConfig(), TASKS).snapshot(1, {"a": 0.5}) is None


def test_an_undefined_correlation_counts_as_0() -> None:
    """A constant prediction has no correlation; it is worth nothing, but it does not stop the run or win it."""
    selection = Selection(TrainingConfig(best="per-task"), TASKS)
    assert selection.aggregate({"a": 0.8, "b": math.nan}) == 0.4
    assert selection.update({"a": 0.8, "b": math.nan}) == [MODEL, A]
    assert selection.update({"a": 0.1, "b": -0.5}) == [B]
    assert selection.update({"a": math.nan, "b": math.nan}) == []
    json.dumps(selection.state(), allow_nan=False)


def test_patience_counts_evaluations_without_a_better_aggregate() -> None:
    selection = Selection(TrainingConfig(patience=2), TASKS)
    seen = []
    for score in (0.5, 0.4, 0.6, 0.6, 0.6):
        selection.update({"a": score})
        seen.append((selection.stale, selection.exhausted))
    assert seen == [(0, False), (1, False), (0, False), (1, False), (2, True)]


def test_without_patience_it_never_stops() -> None:
    selection = Selection(TrainingConfig(), TASKS)
    for _ in range(50):
        selection.update({"a": 0.5})
    assert not selection.exhausted


scores = st.lists(
    st.fixed_dictionaries({"a": st.floats(-1, 1) | st.just(math.nan), "b": st.floats(-1, 1)}), min_size=1, max_size=12
)
rules = st.sampled_from(["mean", "weighted-mean", "any-improves", "task", "per-task", "last"])


@given(scores, rules)
def test_the_last_kept_model_has_the_best_aggregate(history: list[dict[str, float]], best: Any) -> None:
    config = TrainingConfig(best=best, best_task="a", best_weights={"b": 2.0})
    selection = Selection(config, TASKS)
    kept = [number for number, one in enumerate(history) if MODEL in selection.update(one)]
    aggregates = [selection.aggregate(one) for one in history]
    assert kept[0] == 0
    assert selection.best["*"] == max(aggregates)
    if best == "last":
        assert kept == list(range(len(history)))
    elif best != "any-improves":
        assert kept[-1] == aggregates.index(max(aggregates))


@given(scores, rules, st.integers(0, 12), st.integers(0, 3))
def test_goes_on_from_its_state(history: list[dict[str, float]], best: Any, stop: int, patience: int) -> None:
    """What a checkpoint holds is enough: through JSON and back, the same decisions follow."""
    config = TrainingConfig(best=best, best_task="b", patience=patience, snapshots=2)
    whole, first, second = Selection(config, TASKS), Selection(config, TASKS), Selection(config, TASKS)
    steps = list(enumerate(history))

    def go(selection: Selection, part: list[tuple[int, dict[str, float]]]) -> list[Any]:
        return [(selection.update(one), selection.snapshot(step, one), selection.exhausted) for step, one in part]

    expected = go(whole, steps)
    found = go(first, steps[:stop])
    second.restore(json.loads(json.dumps(first.state())))
    found += go(second, steps[stop:])
    assert found == expected
    assert second.snapshots == whole.snapshots
