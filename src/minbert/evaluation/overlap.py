"""Does a model compare meanings or words? Its similarity against the words that two texts share.

    bleu("A man is slicing a bun.", "A man is slicing an onion.")       # 0.53
    points = overlap_points(read_predictions(run, "sts").rows)           # (rows, 3): BLEU, label, prediction
    means = by_overlap(points)

The measure is BLEU (Papineni et al. 2002) of one sentence, smoothed as by Lin & Och (2004): one is added to both counts
of all n-grams longer than a word, so that a pair without four words in a row in common is not 0. The second text is the
candidate and the first its reference.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from minbert.evaluation.diagnosis import Row

ORDER = 4  # n-grams of up to so many words


@dataclass(frozen=True)
class OverlapBin:
    """The pairs whose BLEU lies in [low, high)."""

    low: float
    high: float
    rows: int
    bleu: float
    """Means, this one and the next two."""
    label: float
    prediction: float


def words(text: str) -> list[str]:
    """Words and punctuation marks, in lower case."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def bleu(reference: str, candidate: str, order: int = ORDER) -> float:
    """How much of a candidate's words and runs of words is in the reference, from 0 to 1; 1 for the same words."""
    target, found = words(reference), words(candidate)
    if not target or not found:
        return float(target == found)
    logarithms = []
    for length in range(1, order + 1):
        matched, total = _matches(target, found, length)
        if length > 1:
            matched, total = matched + 1, total + 1
        if not matched:
            return 0.0  # not a word in common
        logarithms.append(math.log(matched / total))
    brevity = min(0.0, 1 - len(target) / len(found))  # a candidate shorter than its reference pays
    return math.exp(brevity + sum(logarithms) / order)


def _matches(reference: list[str], candidate: list[str], length: int) -> tuple[int, int]:
    """The candidate's n-grams that the reference has, none more often than there, and how many it has."""
    have, want = (
        Counter(tuple(text[place : place + length]) for place in range(len(text) - length + 1))
        for text in (candidate, reference)
    )
    return (have & want).total(), have.total()


def overlap_points(rows: Sequence[Row]) -> NDArray[np.float64]:
    """(rows, 3): BLEU, label and prediction of each pair. For two classes the prediction is the second's probability."""
    points = []
    for row in rows:
        odds = row.get("probabilities", ())
        prediction = odds[1] if len(odds) == 2 else row["prediction"]
        points.append((bleu(row["text"], row["text2"]), row["label"], prediction))
    found = np.array(points, dtype=np.float64).reshape(-1, 3)
    return found[np.isfinite(found).all(axis=1)]


def by_overlap(points: NDArray[np.float64], bins: int = 10) -> list[OverlapBin]:
    """Means over the pairs of each tenth of BLEU's range that holds any."""
    filled = np.clip(np.floor(points[:, 0] * bins), 0, bins - 1).astype(np.intp)
    found = []
    for number in np.unique(filled):
        inside = points[filled == number]
        middle, label, prediction = inside.mean(axis=0).tolist()
        edges = (float(number / bins), float((number + 1) / bins))
        found.append(OverlapBin(*edges, len(inside), middle, label, prediction))
    return found
