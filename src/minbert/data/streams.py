"""One task's rows, pass after pass: each pass shuffled and batched anew, no row left out or repeated within it.

    for part in Stream("sst", 0, lengths, 1.0, Budget(rows=32, tokens=0), seed=1).one_pass(0):
        part.rows

Which task's batch comes next is the samplers' concern. Plain numpy, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from minbert.data.batches import BUCKET, plan_batches
from minbert.data.repeats import part_repeats

PASSES = 1  # what a generator is for: a task's own rows; other numbers are in samplers.py and rows.py


@dataclass(frozen=True)
class Part:
    """Rows of one task within a step."""

    task: str
    rows: NDArray[np.int64]
    number: int = 0
    """Of the pass over the task's rows."""


Step: TypeAlias = tuple[Part, ...]


@dataclass(frozen=True)
class Budget:
    """How large a batch may become."""

    rows: int
    tokens: int
    """Padding counted; 0: only the rows count."""

    def cut(
        self, lengths: NDArray[np.integer], rng: np.random.Generator, *, bucket: int = BUCKET
    ) -> list[NDArray[np.int64]]:
        return plan_batches(lengths, rows=self.rows, tokens=self.tokens or None, rng=rng, bucket=bucket)


@dataclass(frozen=True)
class Stream:
    """One task's rows, pass after pass."""

    task: str
    index: int
    lengths: NDArray[np.integer]
    fraction: float
    budget: Budget
    seed: int
    texts: NDArray[np.int64] | None = None
    """(rows, texts of a row), numbered: where given, rows with a text in common are kept out of one batch."""

    @property
    def size(self) -> int:
        """Rows of a pass."""
        return max(1, math.ceil(round(self.fraction * len(self.lengths), 6)))  # 0.07 * 100 is 7.000000000000001

    @cached_property
    def batches(self) -> int:
        """Batches of the first pass; with a token budget others may have a few more or less."""
        return len(self.one_pass(0))

    def choose(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """The rows of a pass: every row as often as the fraction says, and a random part for what is left of it."""
        rows = len(self.lengths)
        whole, rest = divmod(self.size, rows)
        return np.concatenate([np.tile(np.arange(rows), whole), rng.choice(rows, rest, replace=False)])

    def one_pass(self, number: int) -> list[Part]:
        rng = np.random.default_rng([self.seed, PASSES, self.index, number])
        rows = self.choose(rng)
        batches = self.budget.cut(self.lengths[rows], rng)
        if self.texts is not None:
            batches = part_repeats(batches, self.texts[rows], self.lengths[rows], tokens=self.budget.tokens)
        return [Part(self.task, rows[batch], number) for batch in batches]

    def passes(self) -> Iterator[list[Part]]:
        return map(self.one_pass, count())

    def cycle(self) -> Iterator[Part]:
        return chain.from_iterable(self.passes())
