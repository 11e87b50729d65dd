"""Reliability against the metric that sums it up, Wilson's interval against scipy's, the worst mistakes by hand."""

from __future__ import annotations

import numpy as np
import pytest

from minbert.evaluation.diagnosis import reliability, spread, wilson, worst_mistakes
from minbert.evaluation.metrics import calibration_error
from tests.made_up_runs import TASKS, make_rows


def test_reliability_agrees_with_the_metric() -> None:
    rows = make_rows(TASKS["sst"], 500, np.random.default_rng(5))
    bins = reliability(rows)
    error = sum(each.rows * abs(each.right - each.confidence) for each in bins) / 500
    columns = ([row[key] for row in rows] for key in ("label", "probabilities"))
    assert error == pytest.approx(calibration_error(*columns))
    assert sum(each.rows for each in bins) == 500 and all(each.low < each.confidence <= each.high for each in bins)


@pytest.mark.parity
def test_wilson_is_scipys() -> None:
    from scipy.stats import binomtest

    for right, rows in ((0, 5), (7, 9), (120, 400), (3, 3)):
        theirs = binomtest(right, rows).proportion_ci(0.95, "wilson")
        assert wilson(right / rows, rows) == pytest.approx((theirs.low, theirs.high), abs=1e-4)


def test_worst_mistakes_of_three_classes() -> None:
    answers = [(0, [0.6, 0.3, 0.1]), (1, [0.5, 0.4, 0.1]), (2, [0.9, 0.1, 0.0]), (0, [0.1, 0.2, 0.7])]
    rows = [
        {"id": place, "label": float(label), "prediction": float(np.argmax(odds)), "probabilities": odds}
        for place, (label, odds) in enumerate(answers)
    ]
    (group,) = worst_mistakes(rows, ["a", "b", "c"], count=2)
    assert [row["id"] for row in group.rows] == [2, 3] and group.found == 3


@pytest.mark.parametrize("rows", [1, 2, 1499, 1500, 1501, 20_000])
def test_spread_is_even(rows: int) -> None:
    chosen = spread(rows, 1500)
    assert len(chosen) == min(rows, 1500) and chosen[0] == 0 and chosen[-1] == rows - 1
    assert np.ptp(np.diff(chosen)) <= 1 if rows > 1 else True
