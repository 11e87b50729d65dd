"""Losses that compare a batch's vectors with each other: what belongs together is near, everything else is far.

loss = build_contrastive(task)(vectors, labels)      # vectors (rows, views * dim), labels (rows,)

A row's vectors are those of its first text, of its second and, where the task has one, of its third, the hard negative.
All similarities are cosines divided by a temperature. The labels say which rows are anchors, texts that have a partner:
all of a contrastive task, those of the second class, or those with a score above the threshold. The loss is the mean
over the anchors, and 0 where there are none. Every text of the batch is a candidate, also of rows that are no anchors;
but rows without a label (they fill up a fixed layout) are not there at all. A candidate that has the same words as the
anchor's partner is not left out: such a pair of rows asks for the impossible, as it does in the papers.

Nothing is read back from the device, and no shape depends on the labels: a CUDA graph can hold it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from minbert.tasks import Task


def ranking(views: Tensor, anchors: Tensor, there: Tensor, *, temperature: float) -> Tensor:
    """The partner's rank among all second texts, and all third ones: cross entropy over cosines / temperature.

    SimCSE (Gao et al. 2021, arXiv:2104.08821), without labels (the same text twice), with pairs, and with hard
    negatives. It is also the multiple-negatives ranking loss (Henderson et al. 2017, arXiv:1705.00652) with cosines, as
    sentence-transformers has it; there 1 / temperature is called the scale.

    Args:
        views: (views, rows, dim), two or three views.
        anchors: (rows,), true where the first text has a partner, the second.
        there: (rows,), false where a row is only filling.
    """
    first, *others = F.normalize(views, dim=-1)
    similar = first @ torch.cat(others).T / temperature  # (rows, (views - 1) * rows)
    partner = similar.diagonal()
    return _mean(_log_sum(similar, there.repeat(len(others))[None, :]) - partner, anchors)


def info_nce(
    views: Tensor, anchors: Tensor, there: Tensor, *, temperature: float, positive_below: bool = True
) -> Tensor:
    """The partner against all other texts of the batch, firsts and seconds (and thirds) alike.

    InfoNCE (van den Oord et al. 2018, arXiv:1807.03748) as Gulluk uses it: in a batch of N texts an anchor has N - 2
    negatives. The same arguments as for `ranking`, and:

    Args:
        positive_below: the partner is in the denominator too. As Gulluk prints the formula it is not, and the loss has
            no lower bound of 0. An anchor that is alone in its batch then has no denominator, and counts 0.
    """
    count, rows, _ = views.shape
    unit = F.normalize(views, dim=-1)
    similar = unit[0] @ unit.flatten(0, 1).T / temperature  # (rows, views * rows)
    itself = torch.eye(rows, dtype=torch.bool, device=views.device)
    nobody = torch.zeros_like(itself)
    partner = torch.cat([nobody, itself] + [nobody] * (count - 2), dim=1)
    negatives = there.repeat(count)[None, :] & ~partner & ~torch.cat([itself] + [nobody] * (count - 1), dim=1)
    below = negatives | partner if positive_below else negatives
    positive = similar[:, rows : 2 * rows].diagonal()
    return _mean(_log_sum(similar, below) - positive, anchors & below.any(dim=1))


def _log_sum(similar: Tensor, counted: Tensor) -> Tensor:
    """log of the sum of exp, over those that count. The others are very low, not -inf: a row of those has no gradient."""
    return torch.logsumexp(similar.masked_fill(~counted, torch.finfo(similar.dtype).min), dim=1)


def _mean(each: Tensor, counted: Tensor) -> Tensor:
    """Over the rows that count; 0 where none does."""
    return torch.where(counted, each, 0.0).sum() / counted.sum().clamp(min=1)


def build_contrastive(task: Task) -> Callable[[Tensor, Tensor], Tensor]:
    """The contrastive loss that a task's row names."""
    count, heat = len(task.views), task.temperature
    table: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "simcse": lambda *given: ranking(*given, temperature=heat),
        "mnr": lambda *given: ranking(*given, temperature=heat),
        "info-nce": lambda *given: info_nce(*given, temperature=heat),
        "info-nce-printed": lambda *given: info_nce(*given, temperature=heat, positive_below=False),
    }
    chosen = table[task.loss]

    def loss(vectors: Tensor, labels: Tensor) -> Tensor:
        views = vectors.view(len(vectors), count, -1).transpose(0, 1)  # (views, rows, dim)
        return chosen(views, anchors_of(task, labels), labels.isfinite())

    return loss


def anchors_of(task: Task, labels: Tensor) -> Tensor:
    """The rows whose texts belong together, (rows,)."""
    if task.is_contrastive:
        return labels.isfinite()
    return labels == 1 if task.is_classification else labels > task.threshold
