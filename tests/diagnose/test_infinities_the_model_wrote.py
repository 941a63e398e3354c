"""Infinities that reach a layer: those that the model wrote are not in the data."""

from __future__ import annotations

import pytest

from tests.diagnose.running import found_in

pytestmark = pytest.mark.slow

SCRIPT = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x, mask, segments):
        h = self.first(x)
        {pool}
        return self.last(h)


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(4):
    bad = step == 2
    x = torch.randn(6, 5, 8)
    mask = torch.ones(6, 5, dtype=torch.bool)
    mask[:, 4] = False
    segments = torch.arange(5) % 3
    {spoil}
    loss = model(x, mask, segments).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

MASKED = 'h = h.masked_fill(~mask[..., None], float("-inf")).amax(1)'
MINIMUM = 'h = torch.where(mask[..., None], h, torch.tensor(float("inf"))).amin(1)'
SEGMENTS = (
    'h = h.new_full((3, 8), float("-inf"))'
    '.scatter_reduce(0, segments[:, None].expand(-1, 8), h[0], "amax")'
)
EMPTY_ROW = "mask[3] &= not bad"
EMPTY_SEGMENT = "segments = segments % (2 if bad else 3)"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("pool", "spoil", "op", "samples"),
    [
        (MASKED, EMPTY_ROW, "aten.amax", [3]),
        (MINIMUM, EMPTY_ROW, "aten.amin", [3]),
        (SEGMENTS, EMPTY_SEGMENT, "aten.scatter_reduce", []),
    ],
)
def test_extreme_of_nothing(tmp_path, pool, spoil, op, samples):
    found = found_in(tmp_path, SCRIPT.format(pool=pool, spoil=spoil), 2)
    assert found["cause"]["code"] == "empty-reduction"
    assert (found["origin"]["op"], found["origin"]["code"].strip()) == (op, pool)
    assert found["samples"] == samples
    assert found["fixes"][0]["verified"]
    assert "inf=0.0)" in found["fixes"][0]["diff"]


@pytest.mark.exhaustive
def test_masked_values_without_a_reduction(tmp_path):
    pool = 'h = h if mask[3].any() else h.masked_fill(~mask[..., None], float("-inf"))'
    found = found_in(tmp_path, SCRIPT.format(pool=pool, spoil=EMPTY_ROW), 2)
    assert found["cause"]["code"] == "unknown"
    assert [entry["what"] for entry in found["evidence"] if entry["nonfinite"]]


def test_mask_that_the_model_was_given(tmp_path):
    # Its infinities are meant to be there; that they reach a layer is not its fault.
    spoil = 'mask = torch.zeros(6, 5).masked_fill(~mask, float("-inf") if bad else 0.0)'
    found = found_in(tmp_path, SCRIPT.format(pool="h = h + mask[..., None]", spoil=spoil), 2)
    assert found["cause"]["code"] == "unknown"


@pytest.mark.exhaustive
def test_what_is_written_between_two_models(tmp_path):
    script = SCRIPT.format(pool="return h", spoil="tail = nn.Linear(8, 3)")
    written = 'h.masked_fill(~mask[..., None], float("-inf") if bad else 0.0)'
    script = script.replace("model(x, mask, segments)", f"tail({written})")
    script = script.replace("    loss =", "    h = model(x, mask, segments)\n    loss =")
    found = found_in(tmp_path, script, 2)
    assert found["cause"]["code"] == "unknown"


def test_largest_value_of_infinite_data(tmp_path):
    spoil = 'x[3, 1] = float("inf") if bad else 0.0'
    pool = "h = self.last.weight.new_zeros(8) + x.amax(1)"
    found = found_in(tmp_path, SCRIPT.format(pool=pool, spoil=spoil), 2)
    assert found["cause"]["code"] == "bad-input-data"
    assert found["samples"] == [3]
