"""Examples to token sequences, one set for each view that a task's head reads, and steps of them to one batch.

A step's sequences, of all its tasks and views, are stacked into one matrix, so that the encoder runs once a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from minbert.data.batches import Padded, pad
from minbert.data.raw import Examples
from minbert.data.samplers import Step
from minbert.data.tokenizer import Tokenizer, Tokens, Truncation
from minbert.tasks import Task, View


@dataclass(frozen=True, eq=False)
class Inputs:
    """A split of a task, ready to be batched."""

    task: Task
    views: tuple[Tokens, ...]
    """In the order of `task.views`."""
    labels: NDArray[np.float64] | None
    truncation: Truncation

    def __len__(self) -> int:
        return len(self.views[0])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """What a row costs: the length of its longest view."""
        return np.max([view.lengths for view in self.views], axis=0)

    def take(self, rows: NDArray[np.integer]) -> Inputs:
        labels = None if self.labels is None else self.labels[rows]
        return Inputs(self.task, tuple(view.take(rows) for view in self.views), labels, self.truncation)


@dataclass(frozen=True, eq=False)
class PartOfBatch:
    """Where a task's rows lie in a batch: view v of row i is sequence `start + v * rows + i`."""

    task: str
    start: int
    rows: int
    views: int
    labels: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Batch:
    """All sequences of a step, padded together, and which of them are whose."""

    padded: Padded
    parts: tuple[PartOfBatch, ...]

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)


def tokenize_view(
    view: View, tokenizer: Tokenizer, texts: Sequence[str], pairs: Sequence[str] | None, max_tokens: int
) -> Tokens:
    """The sequences of one way to read the rows."""
    second = pairs or ()
    if view == "first":
        return tokenizer.encode(texts, max_tokens=max_tokens)
    if view == "second":
        return tokenizer.encode(second, max_tokens=max_tokens)
    if view == "joint":
        return tokenizer.encode(texts, second, max_tokens=max_tokens)
    return tokenizer.encode(second, texts, max_tokens=max_tokens)


def tokenize(task: Task, examples: Examples, tokenizer: Tokenizer, max_tokens: int) -> Inputs:
    """A split as its task's head reads it."""
    limit = min(max_tokens, tokenizer.positions)
    views = tuple(tokenize_view(view, tokenizer, examples.texts, examples.pairs, limit) for view in task.views)
    return Inputs(task, views, examples.labels, sum((view.truncation for view in views), Truncation()))


def collate(step: Step, data: Mapping[str, Inputs], pad_id: int) -> Batch:
    """One batch out of a sampler's step."""
    chosen: list[Tokens] = []
    parts: list[PartOfBatch] = []
    start = 0
    for part in step:
        inputs = data[part.task]
        labels = np.zeros(0) if inputs.labels is None else inputs.labels[part.rows]
        views = len(inputs.views)
        parts.append(PartOfBatch(part.task, start, len(part.rows), views, labels.astype(np.float32)))
        chosen += [view.take(part.rows) for view in inputs.views]
        start += len(part.rows) * views
    tokens = Tokens.join(chosen)
    return Batch(pad(tokens, np.arange(len(tokens)), pad_id), tuple(parts))
