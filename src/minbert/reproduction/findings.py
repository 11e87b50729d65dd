"""Did a claim hold? Paired differences over the seeds that both rows have, with a 95% t interval.

verdict = judge(finding, better, worse)     # scores by seed: {1: {"sst": 0.51, "mean": 0.73}, ...}
verdict.word                                # "held", "did not hold", "undecided" or "not compared"
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minbert.evaluation.diagnosis import t_reach
from minbert.reproduction.recipes import EVERY_TASK, MEAN, Finding

HELD, DID_NOT_HOLD, UNDECIDED = "held", "did not hold", "undecided"
NOT_COMPARED = "not compared"
MARGIN = 0.01
"""A row is "no better" than another if it is surely less than a point above it."""

Scores = Mapping[str, float]


@dataclass(frozen=True)
class Difference:
    """Better minus worse on one task, over seeds."""

    on: str
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def half(self) -> float:
        """Half the width of the 95% interval; infinite for fewer than two seeds."""
        return t_reach(self.values)

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def word(self, kind: str) -> str:
        if len(self.values) < 2:
            return UNDECIDED
        if kind == "better":
            return HELD if self.low > 0 else DID_NOT_HOLD if self.high < 0 else UNDECIDED
        return DID_NOT_HOLD if self.low > 0 else HELD if self.high < MARGIN else UNDECIDED


@dataclass(frozen=True)
class Verdict:
    finding: Finding
    differences: tuple[Difference, ...]
    """One, or one for each task."""
    hindrance: str = ""
    """Why the differences, which are shown, say nothing about the claim."""

    @property
    def seeds(self) -> int:
        """That both rows have."""
        return max((len(difference.values) for difference in self.differences), default=0)

    @property
    def word(self) -> str:
        """Of every task it holds only if it does of each."""
        if self.hindrance or not self.seeds:
            return NOT_COMPARED
        words = {difference.word(self.finding.kind) for difference in self.differences}
        return next((word for word in (DID_NOT_HOLD, UNDECIDED) if word in words), HELD)


def scores_of(results: Mapping[str, Any], rule: str) -> dict[str, float]:
    """Each task's dev score, and their mean by the paper's rule. A correlation that does not exist counts as 0."""
    found = {name: one["metrics"][one["metric"]]["value"] for name, one in results["dev"].items()}
    scores = {name: 0.0 if value is None else float(value) for name, value in found.items()}
    return {**scores, MEAN: float(results["overall"][rule])}


def judge(
    finding: Finding, better: Mapping[int, Scores], worse: Mapping[int, Scores], *, hindrance: str = ""
) -> Verdict:
    """What the runs of two rows, by seed, say about a claim."""
    seeds = sorted(set(better) & set(worse))
    names = [finding.on]
    if finding.on == EVERY_TASK:
        shared = [name for name in better[seeds[0]] if name in worse[seeds[0]]] if seeds else []
        names = [name for name in shared if name != MEAN]
    values = {name: tuple(better[seed][name] - worse[seed][name] for seed in seeds) for name in names}
    return Verdict(finding, tuple(Difference(name, found) for name, found in values.items()), hindrance)
