"""How accuracy is counted."""

from __future__ import annotations

from benchmarks.accuracy import calibration


def test_calibration_compares_what_was_stated_with_what_was_right():
    judged = [(0.95, True), (0.9, True), (0.97, False), (0.8, True), (0.0, False)]
    assert calibration(judged) == [
        {"stated": "0.0 to 0.5", "mean": 0.0, "right": "0/1"},
        {"stated": "0.7 to 0.9", "mean": 0.8, "right": "1/1"},
        {"stated": "0.9 to 1.0", "mean": 0.94, "right": "2/3"},
    ]
