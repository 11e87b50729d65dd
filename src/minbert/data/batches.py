"""Rows to batches of similar length, and batches to padded matrices. Plain numpy: no torch, no randomness of its own.

    for rows in plan_batches(tokens.lengths, tokens=4096, rng=rng):
        batch = pad(tokens, rows, pad_id=0)

A plan without a generator runs from long to short, for inference: the largest batch comes first, so that memory that
does not suffice is found at once. With one, rows are shuffled, grouped by length within buckets, and the batches
shuffled again, for training. Either way each row is in exactly one batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minbert.errors import MinbertError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from minbert.data.tokenizer import Tokens

BUCKET = 50  # batches whose rows are sorted together: enough to save padding, little enough to stay random


@dataclass(frozen=True)
class Padded:
    """Sequences as rows of a matrix, padded on the right."""

    ids: NDArray[np.int64]
    """(rows, tokens)"""
    mask: NDArray[np.bool_]
    """(rows, tokens), True at real tokens."""
    segments: NDArray[np.int64]
    """(rows, tokens), 0 for the first text and 1 for the second of a pair."""


def plan_batches(
    lengths: NDArray[np.integer],
    *,
    rows: int | None = None,
    tokens: int | None = None,
    rng: np.random.Generator | None = None,
    bucket: int = BUCKET,
) -> list[NDArray[np.int64]]:
    """Split the rows into batches by count, by token budget, or by both (whichever is reached first).

    Args:
        lengths: tokens of each row.
        rows: at most so many rows a batch.
        tokens: at most so many tokens a batch, padding counted. A longer row gets a batch of its own.
        rng: shuffles; without it the plan runs from long to short.
        bucket: with `rng`, how many batches' rows are sorted by length together.

    Returns:
        Row numbers, one array a batch; together each row exactly once.
    """
    if rows is None and tokens is None:
        raise ValueError("a batch needs a size: rows, tokens or both")
    if (rows is not None and rows < 1) or (tokens is not None and tokens < 1):
        raise MinbertError(f"a batch of {rows} rows and {tokens} tokens; expected at least 1")
    lengths = lengths.astype(np.int64)  # sorted by their negative below, which unsigned numbers do not have
    if rng is None or len(lengths) == 0:
        return _cut(np.argsort(-lengths, kind="stable"), lengths, rows, tokens)
    shuffled = rng.permutation(len(lengths))
    typical = len(lengths) if rows is None else rows
    if tokens is not None:
        typical = min(typical, max(1, int(tokens // max(1.0, float(np.mean(lengths))))))
    # A small dataset is not sorted as a whole: its batches would have the same members in every pass.
    bucket = max(1, min(bucket, len(lengths) // (4 * typical)))
    batches: list[NDArray[np.int64]] = []
    for start in range(0, len(shuffled), typical * bucket):
        group = shuffled[start : start + typical * bucket]
        batches += _cut(group[np.argsort(-lengths[group], kind="stable")], lengths, rows, tokens)
    return [batches[index] for index in rng.permutation(len(batches))]


def _cut(
    order: NDArray[np.int64], lengths: NDArray[np.integer], rows: int | None, tokens: int | None
) -> list[NDArray[np.int64]]:
    """Cut rows that run from long to short: the first row of a batch says how wide it is."""
    batches = []
    start = 0
    while start < len(order):
        size = len(order) if tokens is None else max(1, int(tokens // max(1, int(lengths[order[start]]))))
        end = start + min(size, rows or size)
        batches.append(order[start:end])
        start = end
    return batches


def pad(tokens: Tokens, rows: NDArray[np.integer], pad_id: int) -> Padded:
    """The rows as one matrix. Padding gets the padding id, segment 0 and mask False."""
    lengths = tokens.lengths[rows]
    width = int(lengths.max(initial=0))
    mask = np.arange(width) < lengths[:, None]
    places = (tokens.offsets[:-1][rows][:, None] + np.arange(width))[mask]  # where each real token lies
    ids = np.full(mask.shape, pad_id, dtype=np.int64)
    segments = np.zeros(mask.shape, dtype=np.int64)
    ids[mask] = tokens.ids[places]
    segments[mask] = tokens.segments[places]
    return Padded(ids, mask, segments)
