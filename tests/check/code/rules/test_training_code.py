"""Rules about the training step and float16, on short files that say what is expected of them.

``training_code.txt`` holds the files, each under a line that begins with ``####``. A line that
ends in ``#! rule`` is one the rule must speak about; all others must be left alone.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nanguard.check.code.code import Code
from nanguard.check.rule import rules_for
from nanguard.source.text import Text

NAMES = [
    "rank-divergent-skip",
    "step-after-zeroed-grads",
    "clip-before-unscale",
    "uninitialised-parameter",
    "half-precision-optimizer-state",
    "eps-too-small-for-half",
    "mask-constant-overflows-half",
    "nan-check-misses-inf",
    "nan-loss-replaced",
    "nan-to-num-hides-cause",
    "loss-clamped",
    "labels-clamped",
    "clip-disabled-by-huge-norm",
    "unsafe-checkpoint-load",
    "unclipped-recurrent-training",
    "anomaly-mode-left-on",
    "ctc-without-zero-infinity",
    "fp16-loss-not-scaled",
    "eps-lost-in-float32",
    "division-by-probability",
    "nan-hidden-from-log",
]
FILES = Path(__file__).with_name("training_code.txt").read_text(encoding="utf-8")
CASES = [block.partition("\n") for block in re.split(r"^#### ?", FILES, flags=re.MULTILINE)[1:]]


def expected(text: str) -> set[tuple[str, int]]:
    found = set()
    for number, line in enumerate(text.splitlines(), 1):
        marked = re.search(r"#! (.+)$", line)
        names = marked.group(1).split(",") if marked else ()
        found |= {(name.strip(), number) for name in names}
    return found


def test_every_rule_is_asked():
    asked = {name for _, _, text in CASES for name, _ in expected(text)}
    assert asked == set(NAMES)


@pytest.mark.parametrize("text", [text for _, _, text in CASES], ids=[t for t, _, _ in CASES])
def test_rules_speak_where_they_should_and_nowhere_else(text: str):
    code = Code.parse(Text("train.py", text))
    rules = [rule for rule in rules_for("code") if rule.name in NAMES]
    assert len(rules) == len(NAMES)
    found = {(f.name, f.line) for rule in rules for f in rule.check(code)}
    assert found == expected(text)
