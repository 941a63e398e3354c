"""A system's own tests of its numerics run as its team would run them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from examples.story import HOME

pytestmark = pytest.mark.slow

_TESTED = sorted(path.parent.name for path in HOME.glob("*/test_stability.py"))


@pytest.mark.parametrize("name", _TESTED)
def test_its_own_tests_pass(name):
    # In a process of their own: the systems' modules have the same names.
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_stability.py"]
    ended = subprocess.run(words, cwd=HOME / name, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:]
