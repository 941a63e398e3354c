"""Patterns over foreign text are linear: no line, name or number holds a check up."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("resource", reason="needs limits on processor time")
# Of processor time: hundreds of times what a linear search of this size takes, and a fraction of
# what a quadratic one does.
SIZE, SECONDS = 40_000, 2
LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (12, 12))
"""
CHECK = (
    LIMITED
    + """
sys.argv = ["nanguard", "check", "--format", "json", *sys.argv[1:]]
from nanguard.cli import main
main()
"""
)


def test_every_pattern_is_linear_over_text_that_is_made_for_it():
    done = subprocess.run(
        [sys.executable, "-m", "tests.check.pumping", str(SIZE), str(SECONDS)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    last = done.stdout.splitlines()[-1:] or [done.stderr]
    assert last == ["all are linear"], f"it was ended by {done.returncode} at: {last[0]}"


def test_the_shape_of_a_line_has_one_reading():
    # Numbers with a sign in their exponent, and the same sign between them.
    program = (
        LIMITED
        + """
from nanguard.check.log.grammar import read_line
from nanguard.check.log.grammar import shape_of
for joint in "-+.,:/ ":
    for number in ("1e5", "1.5", "1e-5", "-2", "7e", ".5", "3E+4"):
        text = "step 1 loss 1.0 " + joint.join([number] * 60)
        shape = shape_of(text, read_line(text))
        if shape is not None:
            shape.compiled.match(text + " x")
            shape.compiled.match(text[:-1] + "x")
print("done")
"""
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.stdout == "done\n", done.returncode


STEPS = "".join(f"step {at} loss 1.5\n" for at in range(8))
JOINED = "-".join(["1e5"] * 40)
LONG: dict[str, str] = {
    "train.txt": STEPS + "epoch" + "0" * 4000 + "\n",
    "notes": "epoch" + "0" * 4000 + "\n",
    "spaces.log": STEPS + "loss" + " " * 60_000 + "1%\n",
    "steps.log": "".join(f"step {at} loss 1.0 {JOINED} {'xyzw'[at % 4]}\n" for at in range(9)),
    "digits.log": STEPS + "loss " + "1" * 60_000 + "x\n",
    "words.log": STEPS + "step " * 12_000 + "\n",
    "digits.yaml": "learning_rate: 0.001\nbatch_size: " + "7" * 50_000 + "\n",
    "point.yaml": "learning_rate: " + "7" * 50_000 + "x\nbatch_size: 8\n",
    "times.yaml": "learning_rate: 1" + ":59" * 15_000 + "\nbatch_size: 8\n",
    "digits.json": '{"learning_rate": ' + "7" * 50_000 + ', "batch_size": 8}',
    "digits.toml": "learning_rate = 1.5\nbatch_size = " + "7" * 50_000 + "\n",
    "comment.json": '{"learning_rate": 0.1, "batch_size": 8} ' + "/* " * 20_000,
    "cells.csv": "x,label\n" + "1.5,0\n" * 20 + " " * 60_000 + ",1\n",
    "quotes.csv": "x,label\n" + '"a\n' * 9_999,
    "name.py": "is_" * 60_000 + "a = 1\nif " + "is_nan" * 20_000 + "(1):\n    pass\n",
    "spaces.py": "x = 1" + " " * 100_000 + "\n",
    "cell.ipynb": json.dumps(
        {"nbformat": 4, "cells": [{"cell_type": "code", "source": " " * 60_000 + "x y\n"}]}
    ),
}


@pytest.mark.parametrize("name", LONG)
def test_no_file_holds_a_check_up(tmp_path: Path, name: str):
    (tmp_path / name).write_text(LONG[name])
    done = subprocess.run(
        [sys.executable, "-c", CHECK, name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode in (0, 1, 2), done.returncode
    report = json.loads(done.stdout)
    assert "took" not in json.dumps(report["not_checked"])
