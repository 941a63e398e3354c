"""The causes as a whole: all of them are there, and each says what it stands for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from nanguard.diagnose.cause import Cause, all_causes

CODES = {
    "bad-input-data",
    "label-out-of-range",
    "fully-masked-softmax",
    "division-by-zero",
    "log-or-sqrt-domain",
    "gradient-singularity",
    "half-precision-overflow",
    "half-precision-underflow",
    "exp-overflow",
    "exploding-optimization",
    "bad-initialization",
    "degenerate-statistics",
    "optimizer-misuse",
    "empty-reduction",
    "hardware-or-nondeterminism",
    "unknown",
}


def test_every_code_is_there_once():
    codes = [cause.code for cause in all_causes()]
    assert sorted(codes) == sorted(CODES)


def test_one_cause_one_file_named_after_it():
    for cause in all_causes():
        name = type(cause).__module__.rpartition(".")[2]
        assert name.replace("_", "-") == cause.code


def test_each_cause_explains_itself():
    for cause in all_causes():
        assert isinstance(cause, Cause)
        assert len(cause.meaning) > 20
        assert cause.why.endswith(".")
        assert len(cause.why) > 100


def test_causes_can_be_read_without_torch():
    code = (
        "import sys, json; from nanguard.diagnose.cause import all_causes;"
        "print(json.dumps([len(all_causes()), 'torch' in sys.modules]))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(out.stdout) == [len(CODES), False]


def test_no_source_file_knows_a_case():
    names = {path.stem for folder in ("open", "own") for path in _cases(folder).glob("*.py")} - {
        "score"
    }
    text = "\n".join(p.read_text() for p in (_cases(".") / "../../src").resolve().rglob("*.py"))
    assert [name for name in names if name in text] == []


def _cases(folder):
    return Path(__file__).parents[1] / "cases" / folder
