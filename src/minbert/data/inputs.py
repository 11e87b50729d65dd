"""Examples to token sequences, one set for each view that a task's head reads, and steps of them to one batch.

A step's sequences, of all its tasks and views, are laid end to end, so that the encoder runs once a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from minbert.data.cache import TokenCache
from minbert.data.masking import Masking
from minbert.data.raw import Examples
from minbert.data.streams import Step
from minbert.data.tokenizer import Tokenizer, Tokens, Truncation, ranges
from minbert.tasks import Task, View


@dataclass(frozen=True, eq=False)
class Inputs:
    """A split of a task, ready to be batched."""

    task: Task
    views: tuple[Tokens, ...]
    """In the order of `task.views`."""
    labels: NDArray[np.float64] | None
    truncation: Truncation
    masking: Masking | None = None
    """For a masked task."""

    def __len__(self) -> int:
        return len(self.views[0])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """What a row costs: the length of its longest view."""
        return np.max([view.lengths for view in self.views], axis=0)

    @property
    def answer_views(self) -> tuple[Tokens, ...]:
        """Those that an answer is made of: of a contrastive task the first two."""
        return self.views[: len(self.task.answer_views)]

    def take(self, rows: NDArray[np.integer]) -> Inputs:
        labels = None if self.labels is None else self.labels[rows]
        taken = {view: view.take(rows) for view in self.views}
        return replace(self, views=tuple(taken[view] for view in self.views), labels=labels)

    @cached_property
    def hidden(self) -> Hidden:
        """A masked task's rows as they are scored, always with the same masks."""
        if self.masking is None:
            raise ValueError(f"the task {self.task.name} hides no tokens")
        (tokens,) = self.views
        ids, chosen = self.masking.hide(tokens.ids, self.masking.fixed())
        guessed = np.zeros(len(ids), bool)
        guessed[chosen] = True
        return Hidden(Tokens(ids, tokens.segments, tokens.offsets), guessed, tokens.ids)


@dataclass(frozen=True, eq=False)
class Hidden:
    """Sequences some of whose tokens are to be guessed."""

    tokens: Tokens
    guessed: NDArray[np.bool_]
    """(tokens,)"""
    ids: NDArray[np.int32]
    """(tokens,) as they were."""

    @property
    def counts(self) -> NDArray[np.int64]:
        """Tokens to guess in each sequence."""
        return np.diff(np.append(0, np.cumsum(self.guessed))[self.tokens.offsets])


@dataclass(frozen=True, eq=False)
class PartOfBatch:
    """Where a task's rows lie in a batch. The rows of a masked task are the tokens to guess."""

    task: str
    index: NDArray[np.int64]
    """(views, rows): the sequence that is view v of row i; of a masked task, the place of token i."""
    labels: NDArray[np.float32]
    """Of a masked task the ids that the tokens had, exact up to 2^24."""
    texts: int | None = None
    """Of a masked task: how many the tokens are of."""

    @property
    def rows(self) -> int:
        return self.index.shape[1]


@dataclass(frozen=True, eq=False)
class Batch:
    """All sequences of a step, sorted by length, and which of them are whose."""

    tokens: Tokens
    parts: tuple[PartOfBatch, ...]

    @property
    def rows(self) -> int:
        """As the data counts them."""
        return sum(part.rows if part.texts is None else part.texts for part in self.parts)


def tokenize_view(
    view: View,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    pairs: Sequence[str] | None,
    max_tokens: int,
    *,
    thirds: Sequence[str] | None = None,
    cache: TokenCache | None = None,
    weights: Mapping[str, float] | None = None,
) -> Tokens:
    """The sequences of one way to read the rows."""
    encode = partial(tokenizer.encode if cache is None else partial(cache.encode, tokenizer), weights=weights)
    second = pairs or ()
    if view == "first":
        return encode(texts, max_tokens=max_tokens)
    if view == "second":
        return encode(second, max_tokens=max_tokens)
    if view == "third":
        return encode(thirds or (), max_tokens=max_tokens)
    if view == "joint":
        return encode(texts, second, max_tokens=max_tokens)
    return encode(second, texts, max_tokens=max_tokens)


def tokenize(
    task: Task,
    examples: Examples,
    tokenizer: Tokenizer,
    max_tokens: int,
    *,
    cache: TokenCache | None = None,
    seed: int = 0,
    place: int = 0,
    weights: Mapping[str, float] | None = None,
) -> Inputs:
    """A split as its task's head reads it; with `weights` by part of speech where it pools with them. From the recipe's
    seed and the task's place in it a masked one has its masks.
    """
    limit = min(max_tokens, tokenizer.positions)
    columns = examples.texts, examples.pairs
    views = {
        view: tokenize_view(view, tokenizer, *columns, limit, thirds=examples.thirds, cache=cache, weights=weights)
        for view in dict.fromkeys(task.views)  # one that is read twice is tokenized once
    }
    truncation = sum((tokens.truncation for tokens in views.values()), Truncation())
    masking = Masking.of(task, tokenizer, seed=seed, place=place) if task.is_masked else None
    return Inputs(task, tuple(views[view] for view in task.views), examples.labels, truncation, masking)


def collate(step: Step, data: Mapping[str, Inputs]) -> Batch:
    """One batch out of a sampler's step."""
    views = [(view, part) for part in step for view in data[part.task].views]
    lengths = np.concatenate([view.lengths_at(part.rows) for view, part in views])
    order = np.argsort(lengths, kind="stable")
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths[order], out=offsets[1:])
    starts = np.empty(len(lengths), np.int64)  # where each sequence goes
    starts[order] = offsets[:-1]
    ids, segments = np.empty(offsets[-1], np.int32), np.empty(offsets[-1], np.uint8)
    weighted = any(view.weights is not None for view, _ in views)
    weights = np.ones(offsets[-1], np.float32) if weighted else None
    done = 0
    guessed: dict[str, PartOfBatch] = {}
    for view, part in views:
        rows, masking = part.rows, data[part.task].masking
        mine = slice(done, done + len(rows))
        within = ranges(lengths[mine])  # the tokens of each sequence, counted from 0
        source = np.repeat(view.offsets[rows], lengths[mine]) + within
        place = np.repeat(starts[mine], lengths[mine]) + within
        ids[place], segments[place] = view.ids[source], view.segments[source]
        if masking is not None:
            ids[place], chosen = masking.hide(view.ids[source], masking.generator(part.number, rows))
            labels = view.ids[source[chosen]].astype(np.float32)
            guessed[part.task] = PartOfBatch(part.task, place[chosen][None], labels, len(rows))
        if weights is not None and view.weights is not None:
            weights[place] = view.weights[source]
        done += len(rows)
    places = np.empty(len(lengths), np.int64)
    places[order] = np.arange(len(lengths))
    parts: list[PartOfBatch] = []
    done = 0
    for part in step:
        inputs = data[part.task]
        labels = np.zeros(0) if inputs.labels is None else inputs.labels[part.rows]
        count = len(inputs.views) * len(part.rows)
        index = places[done : done + count].reshape(len(inputs.views), -1)
        parts.append(guessed.get(part.task) or PartOfBatch(part.task, index, labels.astype(np.float32)))
        done += count
    return Batch(Tokens(ids, segments, offsets, weights=weights), tuple(parts))
