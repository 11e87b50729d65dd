"""How sentence vectors lie to each other: is a text's partner the nearest, are partners near, does the rest spread out?

    retrieved(first, second)                       # (rows,) 1 where row i's second text is the nearest of all seconds
    alignment(first, second)                       # mean squared distance of partners: less is better
    uniformity(vectors)                            # log mean exp(-2 squared distance) of all pairs: less is better

The last two are Wang & Isola's (2020, arXiv:2005.10242), over vectors of length 1, with their alpha = 2 and t = 2. As in
SimCSE (Gao et al. 2021), partners are the pairs that people say mean the same: of a similarity from 0 to 5 those of 4
and above. numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minbert.errors import MinbertError
from minbert.tasks import Task

PURPOSE = 11  # of the generator that draws the samples
ROWS = 2000
"""Pairs that are looked at, at most; and texts, for uniformity, which takes each with each."""
SAME = 0.8  # of the scale: 4 of 0 to 5
TIE = 1e-6  # cosines that differ by less are equal: float32 has no more digits
BLOCK = 1024  # rows whose similarities to all are in memory at a time

Vectors = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Geometry:
    """What was measured of a task's texts."""

    alignment: float | None
    """None where no pair is known to mean the same."""
    uniformity: float | None
    """None where there are not two texts."""
    positives: int
    """Pairs that alignment is over."""
    texts: int
    """That uniformity is over."""
    vectors: str
    """Which: the head that gave them, or the pooling of the encoder."""

    def summary(self) -> dict[str, Any]:
        """Plain data for results.json."""
        return {
            "alignment": self.alignment,
            "uniformity": self.uniformity,
            "positives": self.positives,
            "texts": self.texts,
            "vectors": self.vectors,
        }


def measure(
    views: Sequence[Vectors], positive: NDArray[np.bool_] | None, rng: np.random.Generator, *, of: str
) -> Geometry:
    """Of a task's texts.

    Args:
        views: the vectors of the first texts and, where there are such, of the second, (rows, dim) each. A text that is
            its own partner is as near to it as can be.
        positive: the rows whose texts mean the same; None: it is not known.
        rng: draws the texts that uniformity is over, where there are more than `ROWS`.
        of: what the vectors are.
    """
    first, second = views[0], views[-1]
    count = 0 if positive is None else int(positive.sum())
    near = alignment(first[positive], second[positive]) if count else None
    texts = np.concatenate(list(views))
    texts = texts[sample(len(texts), rng)]
    spread = uniformity(texts) if len(texts) > 1 else None
    return Geometry(near, spread, count, len(texts), of)


def sample(rows: int, rng: np.random.Generator, most: int = ROWS) -> NDArray[np.int64]:
    """At most so many row numbers, drawn without replacement, in order."""
    return np.sort(rng.permutation(rows)[:most])


def positives(task: Task, labels: NDArray[np.float64] | None) -> NDArray[np.bool_] | None:
    """The rows whose texts mean the same: all of a contrastive task, those of the second of two classes, or those in the
    upper fifth of the scale. None where nothing says so."""
    if labels is None or len(task.classes) > 2:
        return None
    if task.is_contrastive:
        return np.ones(len(labels), dtype=bool)
    if task.is_classification:
        return np.asarray(labels == 1)
    return np.asarray(labels >= task.low + SAME * (task.high - task.low) - 1e-9)


def alignment(first: Vectors, second: Vectors) -> float:
    """Mean squared distance of partners: 0 where they coincide, at most 4."""
    gaps = _unit(first) - _unit(second)
    return float(np.mean(np.sum(gaps * gaps, axis=1)))


def uniformity(vectors: Vectors) -> float:
    """log of the mean of exp(-2 d^2) over all pairs of rows: 0 where all coincide, down to about -4 for many vectors in
    many dimensions."""
    if len(vectors) < 2:
        raise MinbertError(f"uniformity of {len(vectors)} vectors asked for; expected two or more")
    unit = _unit(vectors)
    # d^2 = 2 - 2 cos. With cosines of at most 1 no term is above 1, and the sum of few small ones is exact enough.
    powers = np.exp(4 * np.minimum(unit @ unit.T, 1.0) - 4)
    return float(np.log(powers[np.triu_indices(len(unit), k=1)].mean()))


def retrieved(first: Vectors, second: Vectors) -> NDArray[np.float64]:
    """Whether row i's second vector has the largest cosine with its first, of all second ones: 1 or 0; of k that tie for
    it, each has found 1/k, so that vectors which are all the same find nothing. Where both texts of a row are the same
    one, it is 1 by construction (but for a text that is there twice)."""
    ours, theirs = _unit(first).astype(np.float32), _unit(second).astype(np.float32)
    found = np.zeros(len(ours))
    for start in range(0, len(ours), BLOCK):
        rows = slice(start, start + BLOCK)
        similar = ours[rows] @ theirs.T  # (block, rows)
        own = similar[np.arange(len(similar)), np.arange(start, start + len(similar))]
        first_of_all = own >= similar.max(axis=1) - TIE
        found[rows] = first_of_all / (similar >= own[:, None] - TIE).sum(axis=1)
    return found


def _unit(vectors: Vectors) -> NDArray[np.float64]:
    values = np.asarray(vectors, dtype=np.float64)
    lengths = np.linalg.norm(values, axis=1, keepdims=True)
    return np.asarray(values / np.maximum(lengths, 1e-12))
