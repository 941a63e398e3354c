"""Kernels of ours against the same op made of torch's own: values, derivatives, and their edges.

On a GPU, or with Triton's interpreter on a CPU (``TRITON_INTERPRET=1`` before ``pytest``).
"""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanguard import ops
from nanguard.ops import fused

CUDA = torch.cuda.is_available()
INTERPRETED = bool(os.environ.get("TRITON_INTERPRET"))
DEVICE = "cuda" if CUDA else "cpu"

pytestmark = [
    pytest.mark.gpu,
    # NumPy, of which the interpreter is made, warns of what is tried here on purpose.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.skipif(
        not (CUDA or INTERPRETED), reason="needs a CUDA device or Triton's interpreter"
    ),
]
needs_libdevice = pytest.mark.skipif(not CUDA, reason="the interpreter has no tanh")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_type = pytest.mark.parametrize("dtype", DTYPES, ids=str)
CLOSE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    monkeypatch.setattr(fused, "DEVICE", DEVICE)


def random(*shape: int, dtype=torch.float32, seed: int = 0, grad: bool = True) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=made).to(DEVICE, dtype)
    return x.requires_grad_(grad)


class Seen(TorchDispatchMode):
    """Notes the kernels of ours that a mode gets to see."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        space, name = func._schema.name.split("::")
        if space == "nanguard":
            self.names.add(name)
        return func(*args, **(kwargs or {}))


def both(monkeypatch, form, *inputs, equal_nan: bool = True) -> None:
    """Compares an op with kernels of ours and without, forward, backward and seen by a mode."""
    results = []
    for device in (DEVICE, "nowhere"):
        monkeypatch.setattr(fused, "DEVICE", device)
        own = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        with Seen() as seen:
            out = form(*own)
            weights = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
            wanted = [x for x in own if x.requires_grad]
            grads = torch.autograd.grad(out, wanted, weights.to(out.dtype))
        assert bool(seen.names) == (device == DEVICE), seen.names
        plain = form(*own)
        slopes = torch.autograd.grad(plain, wanted, weights.to(out.dtype))
        for one, other in zip((out, *grads), (plain, *slopes), strict=True):
            assert torch.equal(one.nan_to_num(1e30), other.nan_to_num(1e30))
        results.append((out, *grads))
    tolerance = CLOSE[inputs[0].dtype]
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        scale = float(theirs.detach().float().nan_to_num(0, 0, 0).abs().max().clamp(min=1.0))
        torch.testing.assert_close(
            ours.float(),
            theirs.float(),
            rtol=tolerance,
            atol=tolerance * scale,
            equal_nan=equal_nan,
        )


@needs_libdevice
@every_type
def test_soft_cap(monkeypatch, dtype):
    x = random(37, 129, dtype=dtype).detach() * 5
    x[0, :4] = torch.tensor([math.nan, math.inf, -math.inf, 0.0])
    both(monkeypatch, lambda x: ops.soft_cap(x, 2.0), x.requires_grad_())


@pytest.mark.parametrize("form", [ops.safe_norm, ops.safe_std])
def test_a_whole_number_and_the_same_as_a_float(form):
    x = random(5, 33).detach()
    expected = form(x, -1, eps=2.0)
    assert torch.equal(form(x, -1, eps=2), expected)
    assert torch.equal(form(x, -1, eps=2.0), expected)


@every_type
@pytest.mark.parametrize("rows", [True, False])
def test_safe_div(monkeypatch, dtype, rows):
    below = random(9, 1 if rows else 130, dtype=dtype, seed=1).detach()
    below[0], below[1], below[2] = 0.0, -1e-4, math.inf
    if not rows:
        below[3, 0] = math.nan
    above = random(9, 130, dtype=dtype)
    both(monkeypatch, ops.safe_div, above, below.requires_grad_())


@every_type
@pytest.mark.parametrize("dim", [-1, (1, 2), (0, 1, 2)], ids=str)
def test_safe_norm(monkeypatch, dtype, dim):
    x = random(5, 7, 33, dtype=dtype).detach()
    x[0] = 0.0
    both(monkeypatch, lambda x: ops.safe_norm(x, dim), x.requires_grad_())


@every_type
@pytest.mark.parametrize("correction", [0, 1])
@pytest.mark.parametrize("width", [1, 100])
def test_safe_std(monkeypatch, dtype, correction, width):
    x = random(6, 4, width, dtype=dtype).detach() + 3
    x[0] = 2.0
    x[1, 0, 0] = math.nan
    both(monkeypatch, lambda x: ops.safe_std(x, -1, correction=correction), x.requires_grad_())


@every_type
def test_add_noise(monkeypatch, dtype):
    step = torch.tensor([0, 5, 9, -1, 10], device=DEVICE)
    alphas = ops.linear_schedule(10, device=DEVICE)
    x, noise = random(5, 3, 40, dtype=dtype), random(5, 3, 40, dtype=dtype, seed=1)
    both(monkeypatch, lambda x, noise: ops.add_noise(x, noise, step, alphas), x, noise)


@every_type
@pytest.mark.parametrize("weight", [ops.early_time_weight, ops.late_time_weight])
def test_time_weights(monkeypatch, dtype, weight):
    t = torch.tensor([0.0, -1.0, 1e-3, 0.5, 0.999, 1.0, 1.5, math.nan, math.inf, -math.inf])
    t = t.to(DEVICE, dtype)
    found = weight(t)
    with Seen() as seen:
        assert torch.equal(weight(t).nan_to_num(-1), found.nan_to_num(-1))
    assert seen.names == {"time_weight"}
    monkeypatch.setattr(fused, "DEVICE", "nowhere")
    torch.testing.assert_close(
        found, weight(t), rtol=CLOSE[dtype], atol=CLOSE[dtype], equal_nan=True
    )
    assert found.dtype == dtype
    assert found[-3:].isnan().all()


@every_type
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("target", [True, False])
def test_mask_logits(monkeypatch, dtype, shared, target):
    allowed = torch.rand(1 if shared else 6, 33, generator=torch.Generator().manual_seed(3)) < 0.4
    allowed = allowed.to(DEVICE)
    allowed[..., 2] = True
    if not shared:
        allowed[4] = False
    labels = torch.tensor([2, -100, 40, 2, 2, 7], device=DEVICE) if target else None
    x = random(6, 33, dtype=dtype)
    both(
        monkeypatch,
        lambda x: ops.mask_logits(x, allowed[0] if shared else allowed, labels, on_bad="nan"),
        x,
    )


@every_type
@pytest.mark.parametrize("kind", ["mean", "sum", "none"])
@pytest.mark.parametrize("choice", [None, "each", "shared"])
@pytest.mark.parametrize("on_bad", ["nan", "ignore"])
def test_cross_entropy(monkeypatch, dtype, kind, choice, on_bad):
    allowed = None
    if choice:
        shape = (6, 50) if choice == "each" else (50,)
        allowed = torch.rand(shape, generator=torch.Generator().manual_seed(3)).to(DEVICE) < 0.4
        allowed[..., 2] = True
    target = torch.tensor([2, -100, 2, 2, 2, 70 if on_bad == "ignore" else 2], device=DEVICE)
    x = random(6, 50, dtype=dtype).detach()
    x[1] = math.nan  # where nobody looks
    x[3, 5] = -math.inf
    x = x.requires_grad_()
    both(
        monkeypatch,
        lambda x: ops.checked_cross_entropy(
            x, target, allowed=allowed, reduction=kind, on_bad=on_bad
        ),
        x,
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_logit_stays_visible(monkeypatch, bad):
    x = random(4, 9000).detach()
    x[2, 8500] = bad
    target = torch.tensor([1, 2, 3, 4], device=DEVICE)
    both(
        monkeypatch,
        lambda x: ops.checked_cross_entropy(x, target, on_bad="nan"),
        x.requires_grad_(),
    )
    both(
        monkeypatch,
        lambda x: ops.checked_cross_entropy(x, target, on_bad="nan", reduction="none"),
        x.detach().requires_grad_(),
    )


def test_long_rows_of_logits(monkeypatch):
    x, target = random(3, 20001), torch.tensor([20000, 0, 5], device=DEVICE)
    both(monkeypatch, lambda x: ops.checked_cross_entropy(x * 10, target, on_bad="nan"), x)


@every_type
@pytest.mark.parametrize("shape", [(7, 33), (7, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("empty", [False, True])
def test_masked_means(monkeypatch, dtype, shape, empty):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(3)).to(DEVICE) < 0.7
    mask[0] = not empty
    if empty:
        mask[:] = False
    x, y = random(7, 33, dtype=dtype).detach(), random(7, 33, dtype=dtype, seed=1)
    x[(~mask).expand_as(x)] = math.nan
    both(monkeypatch, lambda x: ops.masked_mean(x, mask), x.requires_grad_())
    both(monkeypatch, lambda x, y: ops.masked_mse(x, y, mask), x, y)


def test_counters_and_refusals(monkeypatch):
    x = random(4, 6)
    empties, bad = ops.Counter(), ops.Counter()
    nothing = torch.zeros(4, 6, dtype=torch.bool, device=DEVICE)
    assert float(ops.masked_mean(x, nothing, empties=empties).detach()) == 0.0
    target = torch.tensor([1, 6, -1, -100], device=DEVICE)
    ops.checked_cross_entropy(x, target, on_bad="report", bad_labels=bad)
    assert (empties.value(), bad.value()) == (1, 2)
    with pytest.raises(ops.labels.UsageError, match=r"label 6 at \(1,\) is not one of 0 to 5"):
        ops.checked_cross_entropy(x, target)
    with pytest.raises(ops.labels.UsageError, match="the target 1 of the sample"):
        ops.mask_logits(x, nothing, target)


@every_type
@pytest.mark.parametrize("bound", [None, 0.7])
def test_adaln(monkeypatch, dtype, bound):
    adaln = ops.AdaLNZero(40, 8, max_scale=bound).to(DEVICE, dtype)
    torch.nn.init.normal_(adaln.project.weight)
    adaln.largest_scale = adaln.largest_scale.float()

    def block(x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        normed, gate = adaln(x, condition)
        return x + gate * normed

    x, condition = random(3, 5, 40, dtype=dtype), random(3, 8, dtype=dtype, seed=1)
    both(monkeypatch, block, x, condition)


def test_the_largest_scale():
    adaln = ops.AdaLNZero(8, 4).to(DEVICE)
    torch.nn.init.constant_(adaln.project.bias, -0.5)
    x, condition = random(2, 3, 8), random(2, 4)
    adaln(x, condition)
    assert float(adaln.largest_scale) == 0.5
    torch.nn.init.constant_(adaln.project.bias, 0.25)
    adaln(x, condition)
    assert float(adaln.largest_scale) == 0.5
    torch.nn.init.constant_(adaln.project.bias, math.nan)
    adaln(x, condition)
    assert math.isnan(float(adaln.largest_scale))


@every_type
@pytest.mark.parametrize(
    "shape", [(2, 1, 16, 16), (2, 1, 1, 16), (16, 16), (2, 4, 16, 16)], ids=str
)
@pytest.mark.parametrize("looked_at", [True, False])
def test_attention(monkeypatch, dtype, shape, looked_at):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(3)).to(DEVICE) < 0.5
    mask[..., 0] = True
    if shape[-2] > 1:
        mask[..., 5, :] = False
    else:
        mask[1] = False
    seen = ops.AttentionMask.of(mask) if looked_at else mask
    results = []
    for device in (DEVICE, "nowhere"):
        monkeypatch.setattr(fused, "DEVICE", device)
        q, k, v = (random(2, 4, 16, 16, dtype=dtype, seed=s) for s in range(3))
        out = ops.attention(q, k, v, seen)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))))
    for ours, theirs in zip(*results, strict=True):
        assert torch.isfinite(ours).all()
        torch.testing.assert_close(ours, theirs, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    assert not results[0][0][1, :, 5].any()


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(lambda x: ops.soft_cap(x, 2.0), marks=needs_libdevice),
        lambda x: ops.safe_div(x, x[:, :1] + 3),
        lambda x: ops.safe_norm(x, -1),
        lambda x: ops.safe_std(x, -1),
        lambda x: ops.masked_mean(x.square(), x > -9),
        lambda x: ops.masked_mse(x, x.detach() + 1, x > -9),
        lambda x: ops.checked_cross_entropy(x, x.new_zeros(5, dtype=torch.int64)),
        lambda x: ops.mask_logits(x.square(), x > -9),
        lambda x: ops.add_noise(
            x, x, torch.arange(5, device=x.device), ops.linear_schedule(10, device=x.device)
        ).square(),
    ],
)
def test_second_derivatives_and_transforms(monkeypatch, form):
    results = []
    for device in (DEVICE, "nowhere"):
        monkeypatch.setattr(fused, "DEVICE", device)
        x = random(5, 8)
        (first,) = torch.autograd.grad(form(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        each = torch.func.grad(lambda x: form(x).sum())(x.detach())
        results.append((first, second, each))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_compiler_gets_torch_s_own_operations():
    def loss(x: torch.Tensor) -> torch.Tensor:
        mask = x > -9
        return ops.masked_mean(ops.safe_div(x, x.detach() + 3), mask) + ops.safe_std(x, -1).sum()

    x = random(5, 8)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), loss(x))


def test_other_inputs_take_torch_s_own(monkeypatch):
    monkeypatch.setattr(fused, "_kernels", lambda: pytest.fail("a kernel was used"))
    ops.safe_norm(random(4, 6).double(), -1)
    ops.safe_norm(random(4, 6).t(), -1)
    ops.safe_norm(random(4, 6), 0)
    ops.safe_div(1.0, random(4, 6))
    ops.masked_mean(random(4, 6), random(1, 6) > 0)
    ops.checked_cross_entropy(
        random(4, 6), torch.ones(4, dtype=torch.int64, device=DEVICE), label_smoothing=0.1
    )
