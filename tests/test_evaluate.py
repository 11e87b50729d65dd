"""Scores of a split: quick and full agree, decisions fit dev, and what is undefined is null in JSON."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, log_loss, roc_auc_score

from minbert.config import Recipe
from minbert.data.inputs import Inputs
from minbert.evaluation.evaluate import choose_decision, evaluate_task, labels_of, overall, quick_scores
from minbert.experiment import new_model
from minbert.model.answers import Decision, decode
from minbert.model.multitask import MultitaskModel, outputs_of
from minbert.preparing import prepare
from minbert.task_checks import check_task
from minbert.tasks import BUILT_IN, Task
from tests.runs import small_recipe

SST, QUORA, STS = (check_task(BUILT_IN[name]) for name in ("sst", "quora", "sts"))
TWO_LOGITS = check_task(replace(BUILT_IN["quora"], loss="cross-entropy"))


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(scope="module")
def model_and_dev(tiny_encoder: Path, small_data: Path) -> tuple[Recipe, MultitaskModel, dict[str, Inputs]]:
    recipe = small_recipe(tiny_encoder)
    tokenizer, model, _ = new_model(recipe, torch.device("cpu"))
    with torch.no_grad():
        for head in model.heads.values():
            head.out.weight.mul_(30)  # far enough apart for answers to differ
    return recipe, model.eval(), dict(prepare(recipe, tokenizer, small_data, ("dev",)).inputs["dev"])


def test_quick_scores_are_those_of_the_full_evaluation(
    model_and_dev: tuple[Recipe, MultitaskModel, dict[str, Inputs]],
) -> None:
    recipe, model, dev = model_and_dev
    quick = quick_scores(model, dev)
    assert list(quick) == ["sst", "quora", "sts"]
    for task in recipe.tasks:
        outputs = outputs_of(model, dev[task.name])
        full = evaluate_task(task, labels_of(dev[task.name]), outputs, rng=rng())
        assert quick[task.name] == full.score


@pytest.mark.parametrize(
    ("task", "metric"), [("sst", "macro-f1"), ("quora", "roc-auc"), ("sst", "mean-class-accuracy"), ("sts", "spearman")]
)
def test_quick_scores_use_the_tasks_own_metric(
    task: str, metric: str, model_and_dev: tuple[Recipe, MultitaskModel, dict[str, Inputs]]
) -> None:
    """Those that read probabilities too."""
    _, model, dev = model_and_dev
    changed = replace(dev[task].task, metric=metric)
    inputs = replace(dev[task], task=changed)
    full = evaluate_task(changed, labels_of(inputs), outputs_of(model, inputs), rng=rng())
    assert quick_scores(model, {task: inputs}) == {task: full.metrics[metric].value}
    assert full.score == full.metrics[metric].value


@pytest.mark.parity
def test_figures_against_scikit_learn() -> None:
    generator = rng()
    labels = generator.integers(0, 5, 60).astype(float)
    outputs = generator.normal(size=(60, 5)) + 2 * np.eye(5)[labels.astype(int)]
    found = evaluate_task(SST, labels, outputs, rng=rng())
    answers = outputs.argmax(1)
    assert found.answers.predictions.tolist() == answers.tolist()
    assert found.metrics["accuracy"].value == accuracy_score(labels, answers)
    assert found.metrics["macro-f1"].value == pytest.approx(f1_score(labels, answers, average="macro"))
    powers = np.exp(outputs)
    probabilities = powers / powers.sum(1, keepdims=True)
    assert found.metrics["roc-auc"].value == pytest.approx(roc_auc_score(labels, probabilities, multi_class="ovr"))
    assert found.confusion is not None
    assert found.confusion.tolist() == confusion_matrix(labels, answers).tolist()
    assert found.class_accuracy == pytest.approx(np.diag(found.confusion) / found.confusion.sum(1))


def test_figures_of_scores() -> None:
    labels = np.array([0.0, 1.0, 4.0, 5.0])
    outputs = np.array([[-3.0], [1.0], [3.0], [9.0]])  # clipped to the scale: 0, 1, 3, 5
    found = evaluate_task(STS, labels, outputs, rng=rng())
    assert found.answers.predictions.tolist() == [0, 1, 3, 5]
    assert found.metrics["pearson"].value == pytest.approx(np.corrcoef(labels, [0, 1, 3, 5])[0, 1])
    assert found.metrics["mse"].value == 0.25
    assert (found.confusion, found.class_accuracy, found.answers.probabilities) == (None, None, None)
    assert set(found.summary()) == {"rows", "metric", "metrics"}


def test_an_evaluation_depends_on_its_generator_only() -> None:
    labels, outputs = np.arange(5.0), np.eye(5)
    one, two = (evaluate_task(SST, labels, outputs, rng=rng()).metrics for _ in range(2))
    assert one == two


def test_what_is_undefined_is_null() -> None:
    """One class only, constant scores: valid JSON without NaN."""
    cases: list[tuple[Task, Any, Any]] = [
        (QUORA, np.ones(4), np.full((4, 1), 0.3)),
        (STS, np.full(4, 2.0), np.arange(4.0)[:, None]),
        (SST, np.zeros(3), np.zeros((3, 5))),
    ]
    for task, labels, outputs in cases:
        summary = evaluate_task(task, labels, outputs, rng=rng()).summary()
        text = json.dumps(summary, allow_nan=False)
        assert "null" in text
    assert math.isnan(evaluate_task(STS, np.full(4, 2.0), np.arange(4.0)[:, None], rng=rng()).score)


# --- decisions ------------------------------------------------------------------------------------------------------


def test_scores_have_nothing_to_decide() -> None:
    assert choose_decision(STS, np.arange(4.0), np.arange(4.0)[:, None]) == Decision()


def test_five_classes_have_no_threshold() -> None:
    decision = choose_decision(SST, np.arange(5.0), 3 * np.eye(5) + rng().normal(size=(5, 5)))
    assert decision.threshold == 0.5
    assert decision.temperature != 1


def test_a_threshold_worked_by_hand() -> None:
    """Logits 1 to 4, the label is 1 from 3 on: the best cut is between the middle two, not at 0."""
    labels = np.array([0.0, 0.0, 1.0, 1.0])
    outputs = np.array([[1.0], [2.0], [3.0], [4.0]])
    assert decode(QUORA, outputs).predictions.tolist() == [1, 1, 1, 1]
    decision = choose_decision(QUORA, labels, outputs)
    found = evaluate_task(QUORA, labels, outputs, rng=rng(), decision=decision)
    assert found.answers.predictions.tolist() == labels.tolist()
    assert found.metrics["accuracy"].value == 1


@pytest.mark.parametrize("task", [QUORA, TWO_LOGITS, SST])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_on_its_own_labels_a_decision_is_never_worse(task: Task, data: st.DataObject) -> None:
    """Accuracy at least as high, and the likelihood of the labels at least as good."""
    rows = data.draw(st.integers(2, 20))
    classes = len(task.classes)
    labels = np.array(data.draw(st.lists(st.integers(0, classes - 1), min_size=rows, max_size=rows)), dtype=float)
    outputs = data.draw(hnp.arrays(np.float64, (rows, task.outputs), elements=st.floats(-5, 5, width=32)))
    decision = choose_decision(task, labels, outputs)
    before, after = decode(task, outputs), decode(task, outputs, decision)
    assert np.mean(after.predictions == labels) >= np.mean(before.predictions == labels)
    names = list(range(classes))
    assert (
        log_loss(labels, after.probabilities, labels=names)
        <= log_loss(labels, before.probabilities, labels=names) + 1e-9
    )


# --- one number -----------------------------------------------------------------------------------------------------


def test_overall_rules() -> None:
    scores, tasks = {"sst": 0.5, "quora": 0.8, "sts": 0.2}, {"sst": SST, "quora": QUORA, "sts": STS}
    assert overall(scores, tasks) == pytest.approx({"2023": 0.5, "2024": (0.5 + 0.8 + 0.6) / 3})
    nothing = overall({"sst": 0.6, "sts": math.nan}, {"sst": SST, "sts": STS})
    assert nothing == pytest.approx({"2023": 0.3, "2024": (0.6 + 0.5) / 2})


def test_rows_without_labels_cannot_be_scored(
    model_and_dev: tuple[Recipe, MultitaskModel, dict[str, Inputs]],
) -> None:
    _, _, dev = model_and_dev
    with pytest.raises(ValueError, match="the rows of sst have no labels"):
        labels_of(replace(dev["sst"], labels=None))
