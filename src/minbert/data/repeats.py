"""Batches in which no text comes twice: for contrastive losses, where a text that comes back is a negative of itself.

    batches = part_repeats(batches, texts, lengths, tokens=4096)

Rows of one length lie together in a batch (`batches.py`), and equal texts have equal lengths, so repeats meet far more
often than by chance. A row that repeats a text changes places with another of about its length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from minbert.data.tokenizer import Tokens

REACH = 400  # rows that are asked to change places, the nearest in length first


def number_texts(views: Sequence[Tokens]) -> NDArray[np.int64]:
    """A number for each text, (rows, views): the same where the tokens are."""
    numbers: dict[bytes, int] = {}
    return np.array(
        [
            [numbers.setdefault(ids.tobytes(), len(numbers)) for ids in np.split(view.ids, view.offsets[1:-1])]
            for view in views
        ]
    ).T


def part_repeats(
    batches: Sequence[NDArray[np.int64]],
    texts: NDArray[np.int64],
    lengths: NDArray[np.integer],
    *,
    tokens: int = 0,
) -> list[NDArray[np.int64]]:
    """The batches, with as many rows each, and no text in two rows of one, as far as that can be.

    Args:
        batches: row numbers; batches without a repeat that nobody changes places with stay as they are.
        texts: (rows, texts of a row), equal numbers for equal texts.
        lengths: tokens of each row.
        tokens: at most so many tokens a batch, padding counted; 0: any number.
    """
    parted = [batch.copy() for batch in batches]
    of_row = [frozenset(row) for row in texts.tolist()]
    held = [Counter(text for row in batch for text in of_row[row]) for batch in parted]
    where = {int(row): (number, place) for number, batch in enumerate(parted) for place, row in enumerate(batch)}
    by_length = np.argsort(lengths, kind="stable")
    rank = np.empty(len(lengths), np.int64)
    rank[by_length] = np.arange(len(lengths))

    def fits(row: int, instead_of: int) -> bool:
        """May the row take the other's place in its batch?"""
        number, place = where[instead_of]
        if any(held[number][text] > (text in of_row[instead_of]) for text in of_row[row]):
            return False
        if not tokens or len(parted[number]) == 1:
            return True
        others = np.delete(parted[number], place)
        return bool(max(lengths[row], lengths[others].max()) * len(parted[number]) <= tokens)

    for row in [row for batch in batches for row in batch.tolist()]:
        number, _ = where[row]
        if all(held[number][text] == 1 for text in of_row[row]):
            continue
        for other in by_length[list(_around(int(rank[row]), len(by_length)))].tolist():
            if where[other][0] != number and fits(row, other) and fits(other, row):
                _swap(row, other, where, parted, held, of_row)
                break
    return parted


def _around(place: int, size: int) -> Iterator[int]:
    """The places beside one, the nearest first."""
    for step in range(1, REACH // 2 + 1):
        yield from (near for near in (place - step, place + step) if 0 <= near < size)


def _swap(
    one: int,
    other: int,
    where: dict[int, tuple[int, int]],
    batches: Sequence[NDArray[np.int64]],
    held: Sequence[Counter[int]],
    of_row: Sequence[frozenset[int]],
) -> None:
    where[one], where[other] = where[other], where[one]
    for row, gone in ((one, other), (other, one)):
        number, place = where[row]
        batches[number][place] = row
        held[number].update(of_row[row])
        held[number].subtract(of_row[gone])
