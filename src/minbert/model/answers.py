"""A head's numbers to an answer: a class with probabilities, or a score. Plain numpy, for every backend alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from minbert.tasks import CONTRASTIVE, Task


@dataclass(frozen=True, eq=False)
class Answers:
    """What a task says of some rows."""

    predictions: NDArray[np.float64]
    """Class numbers, or scores; of a masked task, how many tokens were guessed right."""
    probabilities: NDArray[np.float64] | None
    """(rows, classes); None for a score."""
    losses: NDArray[np.float64] | None = None
    """Of a masked task: of all of a row's tokens together."""


@dataclass(frozen=True)
class Decision:
    """How a task's outputs become an answer; chosen on dev."""

    temperature: float = 1.0
    """Logits are divided by it, so that probabilities mean what they say."""
    threshold: float = 0.5
    """For two classes: the second is answered from this probability on."""


def decode(task: Task, outputs: NDArray[np.floating], decision: Decision | None = None) -> Answers:
    """Outputs, (rows, outputs), to answers."""
    decision = decision or Decision()
    raw = np.asarray(outputs, dtype=np.float64)
    if task.is_masked:
        return Answers(raw[:, 0], None, raw[:, 1])
    if not task.is_classification:
        return Answers(_scores(task, raw[:, 0]), None)
    logits = logits_of(task, raw)
    probabilities = probabilities_of(logits / decision.temperature)
    if len(task.classes) == 2:
        predictions = (probabilities[:, 1] >= decision.threshold).astype(np.float64)
    else:
        predictions = logits.argmax(1).astype(np.float64)  # no temperature moves it; probabilities can round to a tie
    return Answers(predictions, probabilities)


def mean_outputs(task: Task, tasks: Sequence[Task], outputs: Sequence[NDArray[np.floating]]) -> NDArray[np.float32]:
    """The outputs that `decode` turns into the mean of several models' probabilities, or of their scores.

    Probabilities and not logits: they mean the same whatever loss a model was trained with, and one model that is very
    sure of itself cannot outvote all others.

    Args:
        task: in whose form the outputs are given.
        tasks: the same task as each model has it; losses and heads may differ.
        outputs: what each model's head says, (rows, outputs).
    """
    answers = [decode(own, raw) for own, raw in zip(tasks, outputs, strict=True)]
    if task.is_classification:
        mean = np.mean([answer.probabilities for answer in answers], axis=0)  # type: ignore[arg-type]
        logs = np.log(np.maximum(mean, 1e-300))  # (rows, classes)
        return (logs if task.outputs > 1 else logs[:, 1:] - logs[:, :1]).astype(np.float32)
    scores = np.mean([answer.predictions for answer in answers], axis=0)[:, None]
    if task.has_sigmoid:  # decode lays a sigmoid over the scale: this is the way back
        share = np.clip((scores - task.low) / (task.high - task.low), 1e-12, 1 - 1e-12)
        scores = 2 * np.arctanh(2 * share - 1)
    return scores.astype(np.float32)


def logits_of(task: Task, outputs: NDArray[np.float64]) -> NDArray[np.float64]:
    """One logit a class; a single one (bce) is the second class's against 0."""
    return outputs if task.outputs > 1 else np.hstack([np.zeros_like(outputs), outputs])  # (rows, classes)


def probabilities_of(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def _scores(task: Task, raw: NDArray[np.float64]) -> NDArray[np.float64]:
    if task.has_sigmoid:
        return task.low + (task.high - task.low) * (1 + np.tanh(raw / 2)) / 2  # a sigmoid that cannot overflow
    if not task.bounded or task.loss == "cosent" or task.loss in CONTRASTIVE:  # by the latter only the order is learnt
        return raw
    return np.clip(raw, task.low, task.high)  # never further from a label on the scale
