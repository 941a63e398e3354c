"""What every op promises, one test for each promise, gone through for all of them.

Equal to the plain form away from the edge; finite at and beyond it, forward and backward, in four
types; bad input visible; differentiable as it says; at home under autocast, ``torch.compile`` and
``torch.func``.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from nanguard import ops
from tests.ops.table import OPS, SHAPE, Op, fixed

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# How far a result may be from the one in float64: a few rounding steps of the type.
CLOSE = {torch.float16: 6e-3, torch.bfloat16: 5e-2, torch.float32: 2e-5, torch.float64: 1e-10}

every_op = pytest.mark.parametrize("op", OPS, ids=str)
every_type = pytest.mark.parametrize("dtype", DTYPES, ids=str)
quick = settings(max_examples=8, deadline=None)
SIZE = SHAPE[0] * SHAPE[1]
# What torch itself does while it traces and compiles is deprecated in places.
compiles = pytest.mark.filterwarnings("ignore::DeprecationWarning")
twice = pytest.mark.parametrize("op", [op for op in OPS if op.second], ids=str)


def both_ways(function, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the result, and the gradient of a weighted sum of it."""
    x = x.detach().clone().requires_grad_()
    out = function(x)
    weights = fixed(max(out.numel(), 1), seed=9)[: out.numel()].reshape(out.shape).to(out.dtype)
    (gradient,) = torch.autograd.grad(out, x, weights)
    return out.detach(), gradient


def tensor(values: list[float], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).reshape(SHAPE).to(dtype)


@every_op
@every_type
@quick
@given(data=st.data())
def test_equal_to_the_plain_form_away_from_the_edge(
    op: Op, dtype: torch.dtype, data: st.DataObject
):
    low, high = op.inside
    value = st.floats(low, high)
    x = tensor(data.draw(st.lists(value, min_size=SIZE, max_size=SIZE)), dtype)
    x = x.clamp(low, high)
    out, gradient = both_ways(op.safe, x)
    expected, slope = both_ways(op.plain, x.double())
    assert out.shape == expected.shape
    assert gradient.dtype == dtype
    for ours, theirs in ((out, expected), (gradient, slope)):
        scale = float(theirs.abs().max().clamp(min=1.0))
        torch.testing.assert_close(
            ours.double(), theirs, rtol=CLOSE[dtype], atol=CLOSE[dtype] * scale
        )


@every_op
@every_type
@quick
@given(data=st.data())
def test_finite_at_and_beyond_the_edge(op: Op, dtype: torch.dtype, data: st.DataObject):
    middle = sum(op.inside) / 2
    value = st.sampled_from((*op.edge, middle))
    x = tensor(data.draw(st.lists(value, min_size=SIZE, max_size=SIZE)), dtype)
    out, gradient = both_ways(op.safe, x)
    assert torch.isfinite(out).all(), out
    assert torch.isfinite(gradient).all(), gradient


@every_op
@every_type
def test_bad_input_stays_visible(op: Op, dtype: torch.dtype):
    for bad in op.bad:
        x = torch.full(SHAPE, sum(op.inside) / 2, dtype=dtype)
        x[0, 0] = bad
        assert not torch.isfinite(op.safe(x)).all(), f"{bad} went unseen"


@every_op
def test_derivatives(op: Op):
    low, high = op.inside
    x = torch.linspace(low, high, SIZE + 2, dtype=torch.float64)[1:-1].reshape(SHAPE)
    x = x.requires_grad_()
    assert torch.autograd.gradcheck(op.safe, (x,))
    if op.second:
        assert torch.autograd.gradgradcheck(op.safe, (x,))


@twice
def test_second_derivatives_are_finite_at_the_edge(op: Op):
    for edge in op.edge:
        x = torch.full(SHAPE, edge, dtype=torch.float64, requires_grad=True)
        (first,) = torch.autograd.grad(op.safe(x).sum(), x, create_graph=True)
        if first.requires_grad:
            (second,) = torch.autograd.grad(first.square().sum(), x)
            assert torch.isfinite(second).all(), f"at {edge}: {second}"


class NoHostRead(TorchDispatchMode):
    """Fails whatever would make the host wait for a device."""

    READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        assert name not in self.READS, f"{name} reads from the device"
        if name.startswith("index"):
            indices = [i for i in args[1] if i is not None] if isinstance(args[1], list) else []
            assert all(i.dtype != torch.bool for i in indices), "a boolean index reads"
        return func(*args, **(kwargs or {}))


@every_op
def test_nothing_waits_for_the_device(op: Op):
    x = torch.full(SHAPE, sum(op.inside) / 2)
    with NoHostRead():
        both_ways(op.safe, x)


def test_the_alarm_for_host_reads_rings():
    for read in (lambda x: float(x[0]), lambda x: x[x > 0], torch.nonzero):
        with NoHostRead(), pytest.raises(AssertionError, match="reads"):
            read(torch.ones(3))


@every_op
def test_autocast(op: Op):
    for edge in op.edge:
        x = torch.full(SHAPE, edge)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out, gradient = both_ways(op.safe, x)
        assert torch.isfinite(out).all()
        assert torch.isfinite(gradient).all()


@every_op
def test_vmap_of_grad_is_the_loop(op: Op):
    low, high = op.inside
    batch = torch.linspace(low, high, 2 * SIZE, dtype=torch.float64).reshape(2, *SHAPE)
    batch[1, 0, 0] = op.edge[0]

    def loss(x: torch.Tensor) -> torch.Tensor:
        return op.safe(x).square().sum()

    looped = torch.stack([both_ways(loss, x)[1] for x in batch]) / fixed(1, seed=9)
    torch.testing.assert_close(vmap(grad(loss))(batch), looped)


@compiles
@every_op
def test_compiles_as_one_graph(op: Op):
    x = torch.full(SHAPE, sum(op.inside) / 2)
    x[0, 0] = op.edge[0]
    torch.compiler.reset()
    compiled = torch.compile(op.safe, backend="aot_eager", fullgraph=True)
    for ours, theirs in zip(both_ways(compiled, x), both_ways(op.safe, x), strict=True):
        torch.testing.assert_close(ours, theirs)


@every_op
def test_no_call_takes_its_arguments_apart(op: Op, monkeypatch: pytest.MonkeyPatch):
    # Torch does before each call of a function with a derivative of its own, for longer than an
    # op takes; see ``fused.apply``.
    class Watched:
        signature = staticmethod(lambda *_: pytest.fail("a call was taken apart"))

    monkeypatch.setattr(torch.autograd.function, "inspect", Watched)
    both_ways(op.safe, torch.full(SHAPE, sum(op.inside) / 2))


def test_what_keeps_bad_input_visible_is_no_step_of_backward():
    bounded = ops.hard_cap(torch.ones(3, requires_grad=True), 2.0)
    assert bounded.grad_fn is not None
    assert bounded.grad_fn.name() == "HardtanhBackward0"


def test_the_table_has_every_op_of_a_tensor():
    elsewhere = {
        "AdaLNZero", "AttentionMask", "Counter", "RMSNorm", "TokenCodec", "WarmupCosine",
        "cosine_schedule", "gumbel_noise", "linear_schedule", "warmup_cosine",
    }  # fmt: skip
    names = " ".join(op.name for op in OPS) + " safe_pow"
    assert [name for name in ops.__all__ if name not in elsewhere and name not in names] == []
