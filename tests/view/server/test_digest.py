"""The small curves: few buckets, every extreme, every hole."""

from __future__ import annotations

import math
from array import array

import pytest

from nanguard.view.server.overview import MOST_BUCKETS, Spark, picture


@pytest.mark.parametrize("piece", [1, 7, 1000, 100_000])
def test_extremes_and_holes_are_kept(piece):
    values = array("d", (math.sin(n / 50) for n in range(10_000)))
    values[3333], values[7000], values[9000] = 50.0, math.nan, -math.inf
    spark = Spark()
    for start in range(0, len(values), piece):
        spark.extend(values[start : start + piece])
    assert len(spark.lows) <= MOST_BUCKETS
    assert spark.points == 10_000
    assert spark.bad == 2
    assert max(spark.highs) == 50.0
    assert min(spark.lows) == pytest.approx(-1, abs=1e-3)
    assert sum(spark.holes) == 2
    assert spark.last == values[-1]


def test_line_is_not_joined_over_a_hole():
    spark = Spark()
    spark.extend(array("d", [3, 2, math.nan, math.nan, 2, 1]))
    drawn = picture(spark, "<loss>")
    line = drawn.partition('class="line" d="')[2].partition('"')[0]
    assert line.count("M") == 2
    assert 'class="holes"' in drawn
    assert "&lt;loss&gt;: 1 to 3, 2 not finite" in drawn


@pytest.mark.parametrize(
    "values", [[], [math.nan], [1.0], [2.0, 2.0], [1e308, -1e308], [1e-300, 1e300], [0.0, 5e-324]]
)
def test_any_numbers_can_be_drawn(values):
    spark = Spark()
    spark.extend(array("d", values))
    drawn = picture(spark, "loss").partition("</title>")[2]
    assert "nan" not in drawn
    assert "inf" not in drawn
