"""Scores of a model on a split: quickly while it trains, in full when it is done.

quick = quick_scores(model, inputs)                      # {"sst": 0.49, "sts": 0.87}
full = evaluate_task(task, labels, outputs, rng=rng)     # every metric with its interval
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from minbert.data.inputs import Inputs
from minbert.evaluation.bootstrap import Interval, score
from minbert.evaluation.calibration import best_threshold, fit_temperature
from minbert.evaluation.geometry import retrieved
from minbert.evaluation.metrics import (
    confusion_matrix,
    metrics_of,
    overall_2023,
    overall_2024,
    per_class_accuracy,
)
from minbert.model.answers import Answers, Decision, decode
from minbert.tasks import Task, counted

if TYPE_CHECKING:
    from minbert.model.multitask import MultitaskModel


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Everything measured of one task on one split."""

    task: Task
    labels: NDArray[np.float64]
    answers: Answers
    metrics: Mapping[str, Interval]
    confusion: NDArray[np.intp] | None
    """Rows are labels, columns answers."""
    class_accuracy: NDArray[np.float64] | None

    @property
    def score(self) -> float:
        return self.metrics[self.task.metric_name].value

    def summary(self) -> dict[str, Any]:
        """Plain data for results.json."""
        content: dict[str, Any] = {
            "rows": len(self.labels),
            "metric": self.task.metric_name,
            "metrics": {name: _plain(interval) for name, interval in self.metrics.items()},
        }
        if self.confusion is not None and self.class_accuracy is not None:
            content["classes"] = list(self.task.classes)
            content["confusion"] = self.confusion.tolist()
            content["class_accuracy"] = [_number(value) for value in self.class_accuracy]
        return content


def quick_scores(model: MultitaskModel, splits: Mapping[str, Inputs]) -> dict[str, float]:
    """The metric of each task, without intervals; the model must be in eval mode."""
    from minbert.model.multitask import outputs_of  # torch, which scoring what a model said does not need

    scores = {}
    for name, inputs in splits.items():
        answers = judge(inputs.task, outputs_of(model, inputs))
        metric = metrics_of(inputs.task.kind)[inputs.task.metric_name]
        found = answers.probabilities if metric.reads == "probabilities" else answers.predictions
        scores[name] = float(metric(labels_of(inputs), found))  # type: ignore[arg-type]
    return scores


def evaluate_task(
    task: Task,
    labels: NDArray[np.float64],
    outputs: NDArray[np.floating],
    *,
    rng: np.random.Generator,
    decision: Decision | None = None,
    samples: int = 1000,
) -> Evaluation:
    """Every metric of a task's outputs, with bootstrap intervals."""
    answers = judge(task, outputs, decision)
    found = answers.predictions, answers.probabilities
    metrics = score(task.kind, labels, *found, losses=answers.losses, rng=rng, samples=samples)
    if not task.is_classification:
        return Evaluation(task, labels, answers, metrics, None, None)
    classes = len(task.classes)
    return Evaluation(
        task,
        labels,
        answers,
        metrics,
        confusion_matrix(labels, answers.predictions, classes),
        per_class_accuracy(labels, answers.predictions, classes),
    )


def judge(task: Task, outputs: NDArray[np.floating], decision: Decision | None = None) -> Answers:
    """A whole split's outputs as answers. A contrastive task has vectors there, and its answer is whether each row's
    second text is the nearest of all: 1 or 0, or a share of 1 where several tie."""
    if not task.is_contrastive:
        return decode(task, outputs, decision)
    return Answers(retrieved(*np.split(outputs, 2, axis=1)), None)


def choose_decision(task: Task, labels: NDArray[np.float64], outputs: NDArray[np.floating]) -> Decision:
    """Temperature and threshold that fit these labels best (dev's)."""
    if not task.is_classification:
        return Decision()
    raw = np.asarray(outputs, dtype=np.float64)
    temperature = fit_temperature(raw[:, 0] if task.outputs == 1 else raw, labels)
    if len(task.classes) != 2:
        return Decision(temperature)
    probabilities = decode(task, outputs, Decision(temperature)).probabilities
    assert probabilities is not None
    return Decision(temperature, best_threshold(probabilities[:, 1], labels))


def overall(scores: Mapping[str, float], tasks: Mapping[str, Task]) -> dict[str, float]:
    """The two rules of the course: 2023, the mean; 2024, the mean with correlations as (r + 1) / 2."""
    kinds = {name: task.kind for name, task in tasks.items()}
    found = counted(scores, tasks)
    return {"2023": overall_2023(found), "2024": overall_2024(found, kinds)}


def labels_of(inputs: Inputs) -> NDArray[np.float64]:
    """The rows' labels; of a masked task, how many tokens of each are to be guessed."""
    if inputs.masking is not None:
        return inputs.hidden.counts.astype(np.float64)
    if inputs.labels is None:
        raise ValueError(f"the rows of {inputs.task.name} have no labels")
    return inputs.labels


def _plain(interval: Interval) -> dict[str, float | None]:
    return {"value": _number(interval.value), "low": _number(interval.low), "high": _number(interval.high)}


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return None if np.isnan(value) else float(value)
