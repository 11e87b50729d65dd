"""What the dev predictions tell beyond a score: how far confidence can be trusted, and which mistakes are the worst.

groups = worst_mistakes(read_predictions(run, "quora").rows, classes=["different", "duplicate"])
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minbert.tasks import FIVE

Row = Mapping[str, Any]
"""A line of predictions/TASK.jsonl."""
BY_CONFIDENCE = "By the probability that the wrong class was given: the surest first."
BY_CLASSES = "By how many classes the answer is off, then by its probability: the farthest and surest first."
BY_SIZE = "By the difference of prediction and label: the largest first."

T975 = (
    12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157, 2.228139,
    2.200985, 2.178813, 2.160369, 2.144787, 2.131450, 2.119905, 2.109816, 2.100922, 2.093024, 2.085963,
)  # fmt: skip
"""97.5% points of Student's t for 1, 2, ... degrees of freedom."""


@dataclass(frozen=True)
class Bin:
    """The rows whose confidence lies in (low, high]."""

    low: float
    high: float
    rows: int
    confidence: float
    """Mean probability of the answered class."""
    right: float
    """Share of right answers."""
    interval: tuple[float, float]
    """Of that share: Wilson's, 95%."""


@dataclass(frozen=True)
class Mistakes:
    """Some mistakes of one sort, the worst first."""

    title: str
    rule: str
    """Which are the worst."""
    rows: Sequence[Row]
    found: int
    """How many there are of this sort."""


def reliability(rows: Sequence[Row], bins: int = 15) -> list[Bin]:
    """The bins that hold a row; as many and as wide as those of the metric `ece`, so that both tell the same."""
    probabilities = np.array([row["probabilities"] for row in rows], dtype=np.float64)  # (rows, classes)
    right = probabilities.argmax(axis=1) == np.array([row["label"] for row in rows])
    confidence = probabilities.max(axis=1)
    filled = np.clip(np.ceil(confidence * bins) - 1, 0, bins - 1).astype(np.intp)
    found = []
    for number in np.unique(filled):
        inside = filled == number
        count, share = int(inside.sum()), float(right[inside].mean())
        edges = (float(number / bins), float((number + 1) / bins))
        found.append(Bin(*edges, count, float(confidence[inside].mean()), share, wilson(share, count)))
    return found


def wilson(share: float, rows: int, z: float = 1.96) -> tuple[float, float]:
    """The 95% interval of a share that was measured on so few rows; it stays within 0 and 1."""
    middle = (share + z * z / (2 * rows)) / (1 + z * z / rows)
    reach = z / (1 + z * z / rows) * np.sqrt(share * (1 - share) / rows + z * z / (4 * rows * rows))
    return max(0.0, float(middle - reach)), min(1.0, float(middle + reach))


def t_reach(values: Sequence[float] | NDArray[np.float64]) -> float:
    """Half the width of the 95% interval of a mean, by Student's t; infinite for fewer than two values."""
    freedom = len(values) - 1
    if freedom < 1:
        return math.inf
    z = 1.959964  # far from the table t is near z, and a series tells by how much (Abramowitz & Stegun, 26.7.5)
    series = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    point = T975[freedom - 1] if freedom <= len(T975) else series
    return point * float(np.std(values, ddof=1)) / math.sqrt(freedom + 1)


def worst_mistakes(rows: Sequence[Row], classes: Sequence[str], count: int = 10) -> list[Mistakes]:
    """The worst rows of each direction, by the rule of the task's sort; each group says its own.

    Two classes: false positives and false negatives, by the probability that the wrong class was given. Classes with an
    order, such as very negative to very positive: answered too high and too low, by how many classes, then by that
    probability. Other classes: all wrong answers, by that probability. Without classes, scores: over- and underestimates,
    by how much.
    """
    if not classes:
        return [
            _worst(title, [row for row in rows if sign * _error(row) > 0], BY_SIZE, lambda row: abs(_error(row)), count)
            for sign, title in ((1, "Overestimates"), (-1, "Underestimates"))
        ]
    wrong = [row for row in rows if row["prediction"] != row["label"]]
    if len(classes) == 2:
        titles = {
            1.0: f"False positives: answered \u201c{classes[1]}\u201d",
            0.0: f"False negatives: answered \u201c{classes[0]}\u201d",
        }
        return [
            _worst(title, [row for row in wrong if row["prediction"] == answer], BY_CONFIDENCE, confidence_of, count)
            for answer, title in titles.items()
        ]
    if not is_ordered(classes):
        return [_worst("Wrong answers", wrong, BY_CONFIDENCE, confidence_of, count)]
    return [
        _worst(
            title,
            [row for row in wrong if sign * _error(row) > 0],
            BY_CLASSES,
            lambda row: (abs(_error(row)), confidence_of(row)),
            count,
        )
        for sign, title in ((1, "Answered too high"), (-1, "Answered too low"))
    ]


def is_ordered(classes: Sequence[str]) -> bool:
    """Are the classes steps of one scale: sentiment's five, or numbers such as stars?"""
    return tuple(classes) == FIVE or all(name.strip().lstrip("-").isdecimal() for name in classes)


def confidence_of(row: Row) -> float:
    """The probability of the class that was answered."""
    return float(row["probabilities"][int(row["prediction"])])


def spread(rows: int, most: int) -> NDArray[np.intp]:
    """At most so many row numbers, evenly through all of them."""
    return np.unique(np.linspace(0, rows - 1, min(rows, most)).round().astype(np.intp))


def _error(row: Row) -> float:
    """Above 0 where the answer is too high."""
    return float(row["prediction"]) - float(row["label"])


def _worst(title: str, rows: Sequence[Row], rule: str, badness: Any, count: int) -> Mistakes:
    worst = sorted(rows, key=badness, reverse=True)[:count]  # equals stay in file order
    return Mistakes(title, rule, worst, len(rows))
