"""RMSNorm and AdaLN-Zero."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from nanguard import ops
from nanguard.errors import UsageError


def test_rms_norm_is_torch_s_own_and_shares_its_state():
    theirs, ours = nn.RMSNorm((3, 4), eps=1e-6), ops.RMSNorm((3, 4))
    nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 4)
    assert torch.equal(ours(x), theirs(x))
    assert isinstance(ours, nn.RMSNorm)
    assert ops.RMSNorm(4, elementwise_affine=False).weight is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_all_zero_rows_and_large_rows(dtype):
    x = torch.zeros(2, 8, dtype=dtype)
    x[1] = 60000.0
    x.requires_grad_()
    out = ops.RMSNorm(8, dtype=dtype)(x)
    out.sum().backward()
    assert out[0].tolist() == [0.0] * 8
    assert out[1].float().tolist() == pytest.approx([1.0] * 8, rel=0.01)
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_row_is_visible_and_stays_alone(bad):
    x = torch.ones(3, 4)
    x[1, 2] = bad
    out = ops.RMSNorm(4)(x)
    assert not torch.isfinite(out[1]).all()
    assert torch.isfinite(out[[0, 2]]).all()
    if math.isnan(bad):
        assert out[1].isnan().all()


def test_halves_where_torch_squares_them_in_half_precision(monkeypatch):
    x = torch.tensor([[300.0, 300.0]], dtype=torch.float16)
    native = ops.rms_norm(x, torch.tensor([1.0, 2.0]))
    monkeypatch.setattr("nanguard.ops.norms._SQUARES_WIDE", False)
    assert torch.equal(ops.rms_norm(x, torch.tensor([1.0, 2.0])), native)
    assert native.tolist() == [[1.0, 2.0]]


def test_the_output_has_the_type_of_the_input():
    """A float32 weight beside bfloat16 input; torch warns about it, and widens the result."""
    out = ops.RMSNorm(4)(torch.ones(2, 4, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("eps", [0.0, -1e-6, math.nan])
def test_an_eps_that_divides_by_zero_is_refused(eps):
    for build in (lambda: ops.RMSNorm(4, eps=eps), lambda: ops.AdaLNZero(4, 4, eps=eps)):
        with pytest.raises(UsageError, match="an all-zero row would be divided by it"):
            build()


def adaln(**options) -> ops.AdaLNZero:
    torch.manual_seed(0)
    return ops.AdaLNZero(4, 3, **options)


def test_adaln_begins_as_a_plain_norm_with_a_closed_gate():
    x, condition = torch.randn(2, 5, 4), torch.randn(2, 3)
    normed, gate = adaln()(x, condition)
    torch.testing.assert_close(normed, nn.functional.layer_norm(x, (4,), eps=1e-6))
    assert gate.shape == (2, 1, 4)
    assert not gate.any()


def test_adaln_bounds_its_scale_and_remembers_how_large_it_was():
    block = adaln(max_scale=2.0)
    with torch.no_grad():
        block.project.bias[4:8] = 50.0
    x, condition = torch.randn(2, 5, 4), torch.zeros(2, 3)
    normed, _ = block(x, condition)
    torch.testing.assert_close(normed, 3 * nn.functional.layer_norm(x, (4,), eps=1e-6))
    assert block.largest_scale.item() == 50.0
    assert "largest_scale" not in block.state_dict()
    block.eval()
    with torch.no_grad():
        block.project.bias[4:8] = 70.0
    block(x, condition)
    assert block.largest_scale.item() == 50.0


def test_a_hard_bound_is_equal_to_none_inside_it_and_a_soft_one_keeps_a_gradient():
    x, condition = torch.randn(2, 5, 4), torch.randn(2, 3)
    free, hard, soft = adaln(), adaln(max_scale=9.0), adaln(max_scale=2.0, cap_kind="soft")
    for block in (free, hard):
        torch.manual_seed(1)
        nn.init.normal_(block.project.weight)
    assert torch.equal(free(x, condition)[0], hard(x, condition)[0])
    with torch.no_grad():
        soft.project.bias[4:8] = 6.0
    (soft(x, condition)[0] * x).sum().backward()
    assert soft.project.bias.grad[4:8].abs().min() > 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_scale_stays_visible_through_the_bound(bad):
    for kind in ("hard", "soft"):
        block = adaln(max_scale=2.0, cap_kind=kind)
        with torch.no_grad():
            block.project.bias[5] = bad
        normed, _ = block(torch.randn(2, 5, 4), torch.zeros(2, 3))
        assert not torch.isfinite(normed).all()
        assert not torch.isfinite(block.largest_scale)


def test_adaln_under_autocast_compile_and_with_images():
    block = adaln(max_scale=2.0)
    x, condition = torch.randn(2, 3, 5, 4), torch.randn(2, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        normed, _ = block(x, condition)
    assert normed.shape == x.shape
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, condition)[0], block(x, condition)[0])


def test_adaln_refuses_a_bound_that_is_none():
    with pytest.raises(UsageError, match="the limit is 0"):
        adaln(max_scale=0.0)
    with pytest.raises(UsageError, match="cap_kind is 'firm'"):
        adaln(max_scale=1.0, cap_kind="firm")(torch.ones(2, 5, 4), torch.ones(2, 3))
