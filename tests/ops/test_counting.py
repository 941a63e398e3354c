"""Counters on the device, and the way into the package."""

from __future__ import annotations

import torch

from nanguard import ops
from tests.test_imports import BLOCKED, run


def test_counts_add_up_reset_and_round_trip():
    counter = ops.Counter()
    assert counter.value() == 0
    counter.add(torch.tensor([True, False, True]))
    counter.add(torch.tensor(True))
    assert counter.value() == 3
    assert repr(counter) == "Counter(3)"
    other = ops.Counter()
    other.load_state_dict(counter.state_dict())
    other.add(torch.tensor([True]))
    assert other.value() == 4
    counter.reset()
    assert counter.value() == 0


def test_counting_in_a_compiled_function():
    counter = ops.Counter()
    mean = torch.compile(
        lambda x, mask: ops.masked_mean(x, mask, empties=counter), backend="eager", fullgraph=True
    )
    for _ in range(3):
        mean(torch.ones(4), torch.zeros(4, dtype=torch.bool))
    assert counter.value() == 3


def test_importing_nanguard_does_not_import_ops_but_has_it():
    out = run(
        "import sys, nanguard\n"
        "print('nanguard.ops' in sys.modules, 'ops' in dir(nanguard))\n"
        "print(nanguard.ops.safe_log.__name__)"
    )
    assert out == "False True\nsafe_log\n"


def test_without_torch_it_says_what_is_missing():
    for how in ("from nanguard import ops", "import nanguard.ops", "import nanguard; nanguard.ops"):
        out = run(BLOCKED + f"try:\n    {how}\nexcept ImportError as error:\n    print(error)\n")
        assert "nanguard.ops needs torch, which is not installed." in out
        assert "[torch]'" in out
