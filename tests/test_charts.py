"""Pictures: axes with round numbers, gaps where nothing is known, long curves made shorter."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from minbert.evaluation.charts import Series, line_chart, rounded, thinned, tick_name, ticks


def test_a_gap_in_a_curve() -> None:
    drawn = line_chart([Series("dev", [(1, 0.5), (2, math.nan), (3, 0.6)])], label="l", x_label="x", y_label="y")
    (path,) = re.findall(r'class="line" d="([^"]+)"', drawn)
    assert path.count("M") == 2 and "L" not in path and "nan" not in drawn


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0.612, 0.847), (-0.3, 0.2), (0, 1e-4), (3, 17_688), (0.5, 0.5), (0, 0)]
)
def test_axes_are_round(low: float, high: float) -> None:
    start, end = rounded(low, high)
    assert start <= low and high <= end and start < end
    found = ticks(start, end, 5)
    assert 2 <= len(found) <= 7
    assert found[0] == pytest.approx(start, abs=1e-9) and found[-1] == pytest.approx(end)
    assert all(len(tick_name(tick)) <= 6 for tick in found)


def test_tick_names() -> None:
    assert [tick_name(tick) for tick in (0, 0.1 + 0.2, -0.5, 20_000, 8e-5)] == [
        "0",
        "0.3",
        "\u22120.5",
        "20,000",
        "8e-5",
    ]


def test_thinned_keeps_the_mean() -> None:
    points = [(float(step), float(step % 7)) for step in range(1000)]
    fewer, size = thinned(points)
    assert size == 9 and len(fewer) == 112 and fewer[-1][0] == 999
    assert fewer[0] == pytest.approx((8.0, np.mean([y for _, y in points[:9]])))
    assert thinned(points[:5]) == (points[:5], 1)
