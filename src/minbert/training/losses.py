"""Losses: tensors in, a scalar out; and how the losses of several tasks become one.

loss = build_loss(task)(outputs, labels)          # outputs (rows, outputs), labels (rows,)

A label that is not a number marks a row that is not there (a batch of a fixed layout has some): it counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from minbert.tasks import CONTRASTIVE, Task
from minbert.training.contrastive import build_contrastive

MISSING = -100  # the class of a row without a label
Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(
    logits: Tensor, labels: Tensor, *, smoothing: float = 0.0, class_weights: Tensor | None = None
) -> Tensor:
    """Over classes; with weights, the weighted mean."""
    classes = labels.nan_to_num(nan=MISSING).long()
    return F.cross_entropy(logits, classes, weight=class_weights, label_smoothing=smoothing, ignore_index=MISSING)


def binary_cross_entropy(
    logits: Tensor, labels: Tensor, *, smoothing: float = 0.0, class_weights: Tensor | None = None
) -> Tensor:
    """One logit a row, (rows, 1), labels 0 or 1: `cross_entropy` of two classes, the first of which has the logit 0."""
    both = torch.cat([torch.zeros_like(logits), logits], dim=-1)  # (rows, 2)
    return cross_entropy(both, labels, smoothing=smoothing, class_weights=class_weights)


def masked_cross_entropy(logits: Tensor, ids: Tensor) -> Tensor:
    """Over the vocabulary, the mean of the tokens that were to be guessed; 0 where there are none."""
    classes = ids.nan_to_num(nan=MISSING).long()
    summed = F.cross_entropy(logits, classes, reduction="sum", ignore_index=MISSING)
    return summed / labelled(ids).sum().clamp(min=1)


def thresholded_bce(logits: Tensor, scores: Tensor, *, threshold: float) -> Tensor:
    """Scores above the threshold count as 1, the others as 0 (Gulluk's baseline for STS)."""
    each = F.binary_cross_entropy_with_logits(logits[:, 0], (scores > threshold).float(), reduction="none")
    return _mean(each, scores)


def mean_squared_error(outputs: Tensor, scores: Tensor) -> Tensor:
    return _mean((outputs[:, 0] - scores.nan_to_num()) ** 2, scores)


def sigmoid_mse(logits: Tensor, scores: Tensor, *, low: float, high: float) -> Tensor:
    """The sigmoid laid over the scale, against the score: a small logit reaches all of it."""
    return mean_squared_error(low + (high - low) * torch.sigmoid(logits), scores)


def cosine_mse(outputs: Tensor, scores: Tensor, *, scale: float, low: float, high: float) -> Tensor:
    """The cosine itself against the score brought to 0..1."""
    wanted = (scores.nan_to_num(nan=low) - low) / (high - low)
    return _mean((outputs[:, 0] / scale - wanted) ** 2, scores)


def cosent(outputs: Tensor, scores: Tensor, *, scale: float = 1.0, sharpness: float = 20.0) -> Tensor:
    """Wants the right order: log(1 + sum of exp(sharpness * (s_i - s_j))) over pairs where j should be above i.

    CoSENT (Su, 2022), as sentence-transformers' CoSENTLoss computes it.
    """
    similar = outputs[:, 0] / scale * sharpness
    gaps = similar[:, None] - similar[None, :]  # (rows, rows): how much i is above j
    wrong_order = scores[:, None] < scores[None, :]  # never so for a score that is not a number
    gaps = gaps.masked_fill(~wrong_order, -torch.inf).flatten()
    return torch.logsumexp(torch.cat([gaps, gaps.new_zeros(1)]), dim=0)


def _mean(each: Tensor, labels: Tensor) -> Tensor:
    """Over the rows that have a label."""
    there = labelled(labels)
    return torch.where(there, each, 0.0).sum() / there.sum()


def labelled(labels: Tensor) -> Tensor:
    """Which rows have a label: what is not a number does not equal itself. (On a GPU `isfinite` is four launches.)"""
    return labels == labels


def build_loss(task: Task, device: torch.device | str = "cpu") -> Loss:
    """The loss that a task's row names, with its settings, for outputs on a device.

    Outputs of a contrastive loss are vectors, (rows, views * dim): see `contrastive.py`.
    """
    if task.loss in CONTRASTIVE:
        return build_contrastive(task)
    weights = torch.tensor(task.class_weights).to(device) if task.class_weights else None

    def with_classes(loss: Callable[..., Tensor]) -> Loss:
        return lambda outputs, labels: loss(
            outputs,
            labels,
            smoothing=task.label_smoothing,
            class_weights=None if weights is None else weights.to(outputs.dtype),
        )

    table: dict[str, Loss] = {
        "cross-entropy": with_classes(cross_entropy),
        "bce": with_classes(binary_cross_entropy),
        "mse": mean_squared_error,
        "sigmoid-mse": lambda logits, scores: sigmoid_mse(logits, scores, low=task.low, high=task.high),
        "cosine-mse": lambda outputs, scores: cosine_mse(
            outputs, scores, scale=task.scale, low=task.low, high=task.high
        ),
        "cosent": lambda outputs, scores: cosent(outputs, scores, scale=task.scale),
        "bce-threshold": lambda outputs, scores: thresholded_bce(outputs, scores, threshold=task.threshold),
        "masked-lm": masked_cross_entropy,
    }
    return table[task.loss]


class LossWeighting(nn.Module):
    """The losses of a step, each times its task's weight. How they are then combined is `training/gradients.py`'s.

    Called with only some of a step's losses, it is told how many tasks the step has.
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        super().__init__()
        self.weights = {task.name: task.weight for task in tasks}

    def forward(self, losses: Mapping[str, Tensor], tasks: int | None = None) -> dict[str, Tensor]:  # noqa: ARG002 - the mean depends on it
        weights = self.weights
        return {task: loss if weights[task] == 1 else weights[task] * loss for task, loss in losses.items()}


class MeanWeighting(LossWeighting):
    """Divided by the number of tasks in the step."""

    def forward(self, losses: Mapping[str, Tensor], tasks: int | None = None) -> dict[str, Tensor]:
        return {task: loss / (tasks or len(losses)) for task, loss in super().forward(losses).items()}


class UncertaintyWeighting(LossWeighting):
    """Learns a noise level for each task (Kendall et al. 2018, arXiv:1705.07115): with s = log variance, a
    classification loss becomes exp(-s) L + s/2, a squared error exp(-s) L / 2 + s/2.
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        tasks = tuple(tasks)
        super().__init__(tasks)
        self.log_variances = nn.ParameterDict({task.name: nn.Parameter(torch.zeros(())) for task in tasks})
        entropies = {
            task.name for task in tasks if task.is_classification or task.is_masked or task.loss in CONTRASTIVE
        }
        self.factors = {task.name: 1.0 if task.name in entropies else 0.5 for task in tasks}

    def forward(self, losses: Mapping[str, Tensor], tasks: int | None = None) -> dict[str, Tensor]:  # noqa: ARG002 - the mean depends on it
        weighted = {}
        for task, loss in super().forward(losses).items():
            noise = self.log_variances[task]
            weighted[task] = self.factors[task] * torch.exp(-noise) * loss + noise / 2
        return weighted


WEIGHTINGS: dict[str, type[LossWeighting]] = {
    "sum": LossWeighting,
    "mean": MeanWeighting,
    "uncertainty": UncertaintyWeighting,
}
