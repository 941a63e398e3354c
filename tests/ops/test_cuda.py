"""What only a GPU can show: no waiting, and a compiler that simplifies."""

from __future__ import annotations

import math

import pytest
import torch

from nanguard import ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def everything(x: torch.Tensor, mask: torch.Tensor, target: torch.Tensor, counter) -> torch.Tensor:
    """Returns one loss that goes through an op of each family."""
    heads = x.view(4, 2, 8, 8)
    seen = ops.attention(heads, heads, heads, mask.view(4, 2, 1, 64)[..., :8])
    bounded = ops.attention(heads, heads, heads, mask[:1, :8].view(1, 1, 8), max_score=5.0)
    steps = torch.zeros(4, dtype=torch.int64, device=x.device)
    noisy = ops.add_noise(x, x.detach(), steps, torch.ones(10, device=x.device))
    loss = ops.masked_cross_entropy(
        noisy, target, mask[:, 0], on_bad="report", bad_labels=counter, empties=counter
    )
    loss = loss + ops.masked_mean(ops.safe_log(x), mask, empties=counter)
    loss = loss + ops.masked_mse(ops.soft_cap(x, 2.0), x.detach(), mask)
    loss = loss + ops.safe_norm(x, -1).sum() + ops.safe_std(x, -1).sum() + ops.rms_norm(x).sum()
    loss = loss + ops.masked_softmax(x, mask).square().sum() + ops.gumbel_noise(x).sum()
    loss = (
        loss + ops.safe_div(1.0, x).sum() + ops.mask_logits(x, mask, on_bad="nan").softmax(-1).sum()
    )
    return loss + seen.sum() + bounded.sum()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_device():
    x = torch.randn(4, 128, device="cuda", requires_grad=True)
    mask = torch.rand(4, 128, device="cuda") > 0.5
    target = torch.randint(0, 128, (4,), device="cuda")
    counter = ops.Counter()
    everything(x, mask, target, counter).backward()
    try:
        torch.cuda.set_sync_debug_mode("error")
        everything(x, mask, target, counter).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert counter.value() >= 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiler_that_simplifies_does_not_lose_what_keeps_bad_input_visible():
    def fused(x: torch.Tensor) -> torch.Tensor:
        return torch.stack((ops.safe_log(x), ops.hard_cap(x, 3.0), ops.soft_cap(x, 3.0)))

    x = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -1.0, 2.0], device="cuda")
    out = torch.compile(fused, fullgraph=True)(x)
    assert not torch.isfinite(out[:, :3]).any()
    torch.testing.assert_close(out[:, 3:], fused(x)[:, 3:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("empty", [False, True])
def test_attention_through_the_fused_kernels(dtype, empty):
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, 4, 64, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)
    )
    mask = torch.rand(2, 1, 64, 64, device="cuda") > 0.5
    mask[..., 0] = True
    if empty:
        mask[1, 0, 7] = False
    out = ops.attention(q, k, v, mask)
    slopes = torch.autograd.grad(out.square().sum(), (q, k, v))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = ops.attention(*wide, mask)
    theirs = torch.autograd.grad(expected.square().sum(), wide)
    close = {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(out.double(), expected, **close)
    for ours, other in zip(slopes, theirs, strict=True):
        torch.testing.assert_close(ours.double(), other, **close)
    assert bool(out[1, :, 7].any()) != empty


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_cross_entropy_is_torch_s_own(dtype):
    logits = torch.randn(64, 1000, device="cuda", dtype=dtype, requires_grad=True)
    target = torch.randint(0, 1000, (64,), device="cuda")
    ours = ops.checked_cross_entropy(logits, target)
    theirs = torch.nn.functional.cross_entropy(logits.float(), target)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        torch.autograd.grad(ours, logits), torch.autograd.grad(theirs, logits)
    )


def test_a_bad_row_of_logits_has_a_bad_gradient_and_a_dropped_one_none():
    logits = torch.full((3, 100), math.nan, device="cuda")
    logits[0] = 0.0
    logits.requires_grad_()
    target = torch.tensor([1, 2, -100], device="cuda")
    loss = ops.checked_cross_entropy(logits, target)
    loss.backward()
    assert not torch.isfinite(loss)
    assert torch.isfinite(logits.grad).any(-1).tolist() == [True, False, True]
    assert not logits.grad[2].any()
