"""Pairs that do not belong together, made from pairs that do: more training rows with the lowest score.

    known = known_pairs(train, dev)
    extra = draw_negatives(train, 1.0, label=0.0, known=known, rng=rng)                       # random
    extra = draw_negatives(train, 1.0, label=0.0, known=known, rng=rng, nearest=nearest)      # mined

Random ones are algorithm 1 of Vinjapuri & Vasireddy (a random other sentence, score 0), but never a pair that the files
hold, nor two texts that a chain of its paraphrases joins. A random sentence is mostly about something else, and soon
there is nothing left to learn from it. Mined ones are near: the other text is one of those closest to the first by an
encoder. The nearest of all are often paraphrases that nobody labelled, and a paraphrase with the lowest score teaches
the wrong thing. So what is left of a text's neighbours without itself and without its pairs is ranked, the first
`FIRST` - 1 ranks are passed over, one of the ranks up to `LAST` is drawn, and only if it shares at most `OVERLAP` of its
words with the text and its cosine is at most `COSINE`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from minbert.data.raw import Examples

Pair = tuple[str, str]
FIRST, LAST = 5, 50  # ranks among the neighbours that a mined negative may have
SPARE = 14  # neighbours asked for beyond those, in the place of known pairs
OVERLAP = 0.6  # words in common, of all words of both texts
COSINE = 0.98  # above it two texts differ by a comma; an encoder that was not trained for it calls all texts similar
TRIES = 50  # draws before all rows are looked at


class Nearest(Protocol):
    """Finds texts by meaning; `model.neighbours` does it with an encoder."""

    def __call__(
        self, queries: Sequence[str], pool: Sequence[str], count: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """For each query its nearest in the pool, the nearest first, and their cosines: (queries, count) both."""


def same_words(text: str) -> str:
    """What two texts share that differ in case, spaces or punctuation only."""
    return " ".join(_words(text)) or text.strip()


def pair_of(one: str, other: str) -> Pair:
    """The same for both orders, and whatever the case and punctuation."""
    first, second = sorted((same_words(one), same_words(other)))
    return first, second


def known_pairs(*splits: Examples) -> set[Pair]:
    """Every pair of some splits, whatever its label."""
    return {pair_of(*texts) for split in splits for texts in zip(split.texts, split.pairs or (), strict=True)}


def groups_of(examples: Examples, least: float) -> dict[str, str]:
    """Texts that a chain of pairs with at least this label joins, each with a text that stands for its group."""
    leader: dict[str, str] = {}

    def find(text: str) -> str:
        while leader.setdefault(text, text) != text:
            leader[text] = leader[leader[text]]  # half the way, for the next who asks
            text = leader[text]
        return text

    labels = np.zeros(0) if examples.labels is None else examples.labels
    for one, other, label in zip(examples.texts, examples.pairs or (), labels.tolist(), strict=True):
        if label >= least:
            leader[find(same_words(one))] = find(same_words(other))
    return {text: find(text) for text in leader}


def draw_negatives(
    examples: Examples,
    rate: float,
    *,
    label: float,
    known: Collection[Pair],
    rng: np.random.Generator,
    nearest: Nearest | None = None,
    groups: Mapping[str, str] | None = None,
) -> Examples:
    """The added rows alone: first texts of the examples with second texts of others, no two the same.

    Args:
        examples: the pairs to take apart.
        rate: rows for each of them; of what is left of a fraction a random part has one more.
        label: of the new rows.
        known: pairs that are not to be drawn.
        rng: says which.
        nearest: draws hard ones; without it any.
        groups: texts of one group are not put together: what means the same as the same text means the same.

    A row for which nothing can be drawn has none.
    """
    rows = _choose(len(examples), rate, rng)
    second = examples.pairs or []
    taken = set(known)
    group = {} if groups is None else groups
    key = cache(same_words)  # a text comes up many times among the neighbours of others

    def may(text: str, other: str) -> bool:
        one, two = sorted((key(text), key(other)))
        return group.get(one, one) != group.get(two, two) and (one, two) not in taken

    find = _random(examples, rng) if nearest is None else _mined(examples, rows, rng, nearest, may)
    kept, others = [], []
    for row in rows.tolist():
        text = examples.texts[row]
        for other in find(row):
            if may(text, second[other]):
                taken.add(pair_of(text, second[other]))
                kept.append(row)
                others.append(other)
                break
    chosen = examples.take(np.array(kept, np.int64))
    return Examples(
        [f"{one}~{examples.ids[other]}" for one, other in zip(chosen.ids, others, strict=True)],
        chosen.texts,
        [second[other] for other in others],
        np.full(len(kept), label),
        chosen.lines,
    )


_Find = Callable[[int], Iterable[int]]
"""For a row, the rows whose second text may be tried, in that order."""


def _choose(rows: int, rate: float, rng: np.random.Generator) -> NDArray[np.int64]:
    """Every row as often as the rate says, and a random part once more for what is left of it."""
    whole, rest = divmod(math.ceil(round(rate * rows, 6)), rows)
    return np.concatenate([np.tile(np.arange(rows), whole), np.sort(rng.choice(rows, rest, replace=False))])


def _random(examples: Examples, rng: np.random.Generator) -> _Find:
    rows = len(examples)

    def find(_row: int) -> Iterable[int]:
        for _ in range(TRIES):
            yield int(rng.integers(rows))
        yield from rng.permutation(rows).tolist()

    return find


def _mined(
    examples: Examples,
    rows: NDArray[np.int64],
    rng: np.random.Generator,
    nearest: Nearest,
    may: Callable[[str, str], bool],
) -> _Find:
    second = examples.pairs or []
    pool: dict[str, int] = {}  # each text once, by its first row
    for row, text in enumerate(second):
        pool.setdefault(text, row)
    queries = {text: place for place, text in enumerate(dict.fromkeys(examples.texts[row] for row in rows))}
    texts, owners = list(pool), list(pool.values())
    index, cosines = nearest(list(queries), texts, min(LAST + SPARE, len(texts)))

    def find(row: int) -> Iterable[int]:
        text = examples.texts[row]
        place, words = queries[text], set(_words(text))
        free = [
            (other, cosine)
            for other, cosine in zip(index[place].tolist(), cosines[place].tolist(), strict=True)
            if may(text, texts[other])
        ]
        fitting = [
            owners[other]
            for other, cosine in free[FIRST - 1 : LAST]
            if cosine <= COSINE and overlap(words, set(_words(texts[other]))) <= OVERLAP
        ]
        return [fitting[number] for number in rng.permutation(len(fitting))]

    return find


def overlap(one: set[str], other: set[str]) -> float:
    """Words in common, of all words of both."""
    return len(one & other) / max(1, len(one | other))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
