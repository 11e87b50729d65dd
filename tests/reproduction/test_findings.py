"""Verdicts worked by hand, and the interval against scipy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from minbert.evaluation.diagnosis import T975, t_reach
from minbert.reproduction.findings import Difference, judge, scores_of
from minbert.reproduction.recipes import Finding


@pytest.mark.parity
def test_the_interval_is_scipys() -> None:
    from scipy import stats

    assert pytest.approx([stats.t.ppf(0.975, freedom) for freedom in range(1, 21)], abs=1e-6) == T975
    values = (0.012, 0.031, -0.004, 0.02)
    found = Difference("sst", values)
    low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert (found.low, found.high) == pytest.approx((low, high))
    many = np.random.default_rng(1).normal(size=400)
    for count in (21, 22, 60, 400):  # from 22 on a series instead of the table
        reach = stats.t.ppf(0.975, count - 1) * stats.sem(many[:count])
        assert t_reach(many[:count]) == pytest.approx(reach, rel=2e-4)
    assert t_reach([0.3]) == float("inf")


def by_seed(*values: float, **others: float) -> dict[int, dict[str, float]]:
    return {seed: {"sst": value, "mean": value / 2, **others} for seed, value in enumerate(values, start=1)}


@pytest.mark.parametrize(
    ("better", "word", "no_better"),
    [
        ((0.52, 0.53, 0.54), "held", "did not hold"),  # +.02 each time: the interval is a point
        ((0.51, 0.53, 0.55), "undecided", "undecided"),  # +.01, +.02, +.03: .02 ± .0248
        ((0.48, 0.49, 0.50), "did not hold", "held"),
        ((0.501, 0.510, 0.519), "undecided", "held"),  # +.001, 0, -.001: surely less than a point
        ((0.60,), "undecided", "undecided"),  # one seed
        ((), "not compared", "not compared"),
    ],
)
def test_verdicts_worked_by_hand(better: tuple[float, ...], word: str, no_better: str) -> None:
    worse = by_seed(0.50, 0.51, 0.52)
    finding = Finding("a claim", "b", "w", "sst")
    assert judge(finding, by_seed(*better), worse).word == word
    assert judge(replace(finding, kind="no better"), by_seed(*better), worse).word == no_better


def test_only_seeds_that_both_rows_have_are_compared() -> None:
    better = {2: {"sst": 0.7}, 3: {"sst": 0.8}, 5: {"sst": 0.1}}
    (found,) = judge(Finding("", "b", "w", "sst"), better, by_seed(0.5, 0.6, 0.6, 0.6)).differences
    assert found.values == pytest.approx((0.1, 0.2))


def test_every_task_holds_only_if_each_does() -> None:
    finding = Finding("", "b", "w", "every task")
    worse = by_seed(0.5, 0.5, sts=0.3)
    assert judge(finding, by_seed(0.6, 0.6, sts=0.4), worse).word == "held"
    verdict = judge(finding, by_seed(0.6, 0.6, sts=0.2), worse)
    assert ([one.on for one in verdict.differences], verdict.word) == (["sst", "sts"], "did not hold")
    assert judge(finding, {}, worse).word == "not compared"


def test_scores_of_a_result() -> None:
    dev = {
        "sst": {"metric": "accuracy", "metrics": {"accuracy": {"value": 0.5}, "ece": {"value": 0.1}}},
        "sts": {"metric": "pearson", "metrics": {"pearson": {"value": None}}},
    }
    found = scores_of({"dev": dev, "overall": {"2023": 0.25, "2024": 0.5}}, "2024")
    assert found == {"sst": 0.5, "sts": 0.0, "mean": 0.5}
