"""Reliability against the metric that sums it up, Wilson's interval against scipy's, the worst mistakes by hand."""

from __future__ import annotations

import numpy as np
import pytest

from minbert.evaluation.diagnosis import is_ordered, reliability, spread, wilson, worst_mistakes
from minbert.evaluation.metrics import calibration_error
from tests.made_up_runs import FIVE, TASKS, make_rows


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


def test_worst_mistakes_of_two_classes_by_direction() -> None:
    odds = [0.9, 0.2, 0.7, 0.4, 0.95]  # of the class 1
    labels = [0, 1, 0, 1, 1]
    rows = [
        {"id": place, "label": float(label), "prediction": float(high > 0.5), "probabilities": [1 - high, high]}
        for place, (label, high) in enumerate(zip(labels, odds, strict=True))
    ]
    positives, negatives = worst_mistakes(rows, ["no", "yes"])
    assert [row["id"] for row in positives.rows] == [0, 2] and "False positives" in positives.title
    assert [row["id"] for row in negatives.rows] == [1, 3] and "False negatives" in negatives.title


def test_classes_with_an_order_by_distance_and_then_by_probability() -> None:
    """(label, answer, its probability): two classes too far counts more than any probability."""
    answers = [(0, 1, 0.9), (0, 4, 0.3), (1, 3, 0.5), (1, 3, 0.6), (2, 2, 0.9), (4, 0, 0.4), (3, 2, 0.8)]
    rows = []
    for place, (label, answer, odds) in enumerate(answers):
        probabilities = [0.0] * 5
        probabilities[answer] = odds
        rows.append({"id": place, "label": label, "prediction": answer, "probabilities": probabilities})
    high, low = worst_mistakes(rows, FIVE)
    assert [row["id"] for row in high.rows] == [1, 3, 2, 0] and high.title == "Answered too high"
    assert [row["id"] for row in low.rows] == [5, 6] and low.title == "Answered too low"
    assert is_ordered(["1", "2", "3"]) and not is_ordered(["billing", "login", "other"])


def test_scores_too_high_and_too_low() -> None:
    rows = [
        {"id": place, "label": label, "prediction": found}
        for place, (label, found) in enumerate([(1.0, 3.0), (5.0, 1.0), (2.0, 2.0), (0.0, 4.5), (3.0, 2.5)])
    ]
    over, under = worst_mistakes(rows, [], count=1)
    assert [row["id"] for row in over.rows] == [3] and (over.title, over.found) == ("Overestimates", 2)
    assert [row["id"] for row in under.rows] == [1] and (under.title, under.found) == ("Underestimates", 2)


@pytest.mark.parametrize("rows", [1, 2, 1499, 1500, 1501, 20_000])
def test_spread_is_even(rows: int) -> None:
    chosen = spread(rows, 1500)
    assert len(chosen) == min(rows, 1500) and chosen[0] == 0 and chosen[-1] == rows - 1
    assert np.ptp(np.diff(chosen)) <= 1 if rows > 1 else True
