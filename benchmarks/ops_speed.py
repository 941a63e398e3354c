"""What each safe op costs, beside the plain torch form it replaces.

Forward and backward together. The two forms take turns in one process, and every ratio compares
neighbours, so that a clock that changes changes for both. "Again" is the plain form measured a
second time: what it differs from 1 is noise. With ``--compiled`` the op is also measured beside
what ``torch.compile`` makes of the plain form. Prints a table and, with ``-o``, writes it as JSON.

    python -m benchmarks.ops_speed                              # what this machine can do
    python -m benchmarks.ops_speed --only log --rounds 30 -o results.json
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.recording import write_results
from nanguard import ops
from nanguard.ops import fused

if TYPE_CHECKING:
    from collections.abc import Callable

    Form = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """One op beside its plain form.

    Attributes:
        name: What it is called in the table.
        plain: The torch form that people write.
        safe: The op.
        inputs: What both get; those that require a gradient are differentiated.
        limit: The ratio that is promised.
        size: What the inputs are, in words.
    """

    name: str
    plain: Form
    safe: Form
    inputs: tuple[Tensor, ...]
    limit: float = 1.05
    size: str = ""


class Maker:
    """Makes inputs on a device, at a size that a training step there has."""

    def __init__(self, device: str, scale: float) -> None:
        self.device = device
        self.cuda = device == "cuda"
        self.scale = scale

    def rows(self, on_cuda: int, on_cpu: int) -> int:
        """Returns how many rows, samples or positions there are."""
        return max(int((on_cuda if self.cuda else on_cpu) * self.scale), 2)

    def random(self, *shape: int, low: bool = False, grad: bool = True) -> Tensor:
        """Returns normal values; in bfloat16 on CUDA where asked."""
        dtype = torch.bfloat16 if low and self.cuda else torch.float32
        return torch.randn(shape, device=self.device, dtype=dtype).requires_grad_(grad)

    def positive(self, *shape: int) -> Tensor:
        """Returns values in (0, 1)."""
        return torch.rand(shape, device=self.device).add_(1e-3).requires_grad_()

    def mask(self, *shape: int, keep: float = 0.8) -> Tensor:
        """Returns a mask in which no row is empty."""
        mask = torch.rand(shape, device=self.device) < keep
        mask[..., 0] = True
        return mask

    def classes(self, size: int, *shape: int) -> Tensor:
        """Returns class numbers."""
        return torch.randint(0, size, shape, device=self.device)


class PlainAdaLN(nn.Module):
    """AdaLN-Zero as diffusion transformers write it."""

    def __init__(self, width: int, bound: float | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.project = nn.Linear(width, 3 * width)
        self.bound = bound

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Returns the gated result, as a block would use it."""
        shift, scale, gate = self.project(F.silu(condition)).chunk(3, dim=-1)
        if self.bound is not None:
            scale = scale.clamp(-self.bound, self.bound)
        normed = self.norm(x) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)
        result: Tensor = x + gate.unsqueeze(1) * normed
        return result


def norm_cases(make: Maker) -> list[Case]:
    """Returns RMSNorm and AdaLN-Zero."""
    width = 2048 if make.cuda else 512
    x = make.random(make.rows(16384, 4096), width, low=True)
    plain, safe = nn.RMSNorm(width, eps=1e-6), ops.RMSNorm(width)
    for norm in (plain, safe):
        norm.to(make.device, x.dtype)
    cases = [Case("RMSNorm", plain, safe, (x,), size=f"{tuple(x.shape)} {x.dtype}")]
    width = 1152 if make.cuda else 256
    tokens = make.random(make.rows(64, 16), 256, width)
    condition = make.random(tokens.shape[0], width)
    for bound in (None, 4.0):
        adaln = ops.AdaLNZero(width, width, max_scale=bound).to(make.device)

        def block(x: Tensor, condition: Tensor, adaln: ops.AdaLNZero = adaln) -> Tensor:
            normed, gate = adaln(x, condition)
            result: Tensor = x + gate * normed
            return result

        name = "AdaLNZero" if bound is None else "AdaLNZero, bounded"
        form = PlainAdaLN(width, bound).to(make.device)
        cases.append(Case(name, form, block, (tokens, condition), size=f"{tuple(tokens.shape)}"))
    return cases


def attention_cases(make: Maker) -> list[Case]:
    """Returns masked softmax and attention."""
    batch, heads, size = make.rows(8, 2), 16 if make.cuda else 4, 64
    # A larger size has more sequences; longer ones would need the square of the memory.
    length = min(make.rows(2048, 512), 2048 if make.cuda else 512)
    scores = make.random(batch, heads, length // 2, length // 2)
    mask = make.mask(batch, 1, length // 2, length // 2)
    padding = make.mask(batch, 1, 1, length)
    full = make.mask(batch, 1, length, length)
    seen = ops.AttentionMask.of(full)
    q, k, v = (make.random(batch, heads, length, size, low=True) for _ in range(3))
    short = tuple(make.random(batch, heads, length // 2, size, low=True) for _ in range(3))
    sdpa, words = F.scaled_dot_product_attention, f"{tuple(q.shape)} {q.dtype}"

    def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = ((q * (1 / math.sqrt(size))) @ k.transpose(-2, -1)).clamp(-10.0, 10.0)
        return torch.softmax(scores.masked_fill(~mask, -math.inf), -1) @ v

    return [
        Case(
            "masked_softmax",
            lambda s: torch.softmax(s.masked_fill(~mask, -math.inf), -1),
            lambda s: ops.masked_softmax(s, mask),
            (scores,),
            size=f"{tuple(scores.shape)}",
        ),
        Case("attention", sdpa, ops.attention, (q, k, v), size=words),
        Case(
            "attention, causal",
            lambda q, k, v: sdpa(q, k, v, is_causal=True),
            lambda q, k, v: ops.attention(q, k, v, is_causal=True),
            (q, k, v),
            size=words,
        ),
        Case(
            "attention, padding mask",
            lambda q, k, v: sdpa(q, k, v, padding),
            lambda q, k, v: ops.attention(q, k, v, padding),
            (q, k, v),
            size=words,
        ),
        Case(
            "attention, full mask",
            lambda q, k, v: sdpa(q, k, v, full),
            lambda q, k, v: ops.attention(q, k, v, full),
            (q, k, v),
            size=words,
        ),
        Case(
            "attention, shared mask",
            lambda q, k, v: sdpa(q, k, v, full),
            lambda q, k, v: ops.attention(q, k, v, seen),
            (q, k, v),
            size=words,
        ),
        Case(
            "attention, bounded scores",
            capped,
            lambda q, k, v: ops.attention(q, k, v, mask, max_score=10.0),
            short,
            size=f"{tuple(short[0].shape)}",
        ),
    ]


def masked_cases(make: Maker) -> list[Case]:
    """Returns means and losses over a mask."""
    rows, width = make.rows(8192, 2048), 1024 if make.cuda else 512
    x, y = make.random(rows, width), make.random(rows, width, grad=False)
    mask = make.mask(rows, 1)
    elements = make.mask(rows, width)
    size = f"({rows}, {width})"

    def mean(x: Tensor, keep: Tensor) -> Tensor:
        return (x * keep).sum() / (keep.sum() * (x.numel() // keep.numel())).clamp(min=1)

    return [
        Case(
            "masked_mean",
            lambda x: mean(x, elements),
            lambda x: ops.masked_mean(x, elements),
            (x,),
            size=size,
        ),
        Case(
            "masked_mse",
            lambda x: mean((x - y) ** 2, mask),
            lambda x: ops.masked_mse(x, y, mask),
            (x,),
            size=size,
        ),
    ]


def label_cases(make: Maker) -> list[Case]:
    """Returns cross-entropies and the masking of logits."""
    rows, classes = make.rows(8192, 1024), 32000 if make.cuda else 8000
    logits, target = make.random(rows, classes, low=True), make.classes(classes, rows)
    few = make.random(make.rows(4096, 1024), 2000)
    label = make.classes(2000, few.shape[0])
    allowed = make.mask(few.shape[0], 2000, keep=0.3)
    allowed.scatter_(-1, label.unsqueeze(-1), value=True)
    mask = make.mask(rows)
    size, small = f"{tuple(logits.shape)} {logits.dtype}", f"{tuple(few.shape)}"

    def plain(x: Tensor) -> Tensor:
        return F.cross_entropy(x.float(), target)

    def plain_masked(x: Tensor) -> Tensor:
        losses = F.cross_entropy(x.float(), target, reduction="none")
        return (losses * mask).sum() / mask.sum().clamp(min=1)

    def plain_allowed(x: Tensor) -> Tensor:
        return F.cross_entropy(x.masked_fill(~allowed, -1e9), label)

    return [
        Case(
            "masked_cross_entropy",
            plain_masked,
            lambda x: ops.masked_cross_entropy(x, target, mask),
            (logits,),
            size=size,
        ),
        Case(
            "checked_cross_entropy, nan",
            plain,
            lambda x: ops.checked_cross_entropy(x, target, on_bad="nan"),
            (logits,),
            size=size,
        ),
        Case(
            "checked_cross_entropy, raise",
            plain,
            lambda x: ops.checked_cross_entropy(x, target),
            (logits,),
            size=size,
        ),
        Case(
            "checked_cross_entropy, allowed",
            plain_allowed,
            lambda x: ops.checked_cross_entropy(x, label, allowed=allowed, on_bad="nan"),
            (few,),
            size=small,
        ),
        Case(
            "mask_logits, nan",
            lambda x: x.masked_fill(~allowed, -1e9),
            lambda x: ops.mask_logits(x, allowed, label, on_bad="nan"),
            (few,),
            size=small,
        ),
    ]


def domain_cases(make: Maker) -> list[Case]:
    """Returns functions with an edge."""
    rows, width = make.rows(4096, 2048), 1024 if make.cuda else 512
    x, p = make.random(rows, width), make.positive(rows, width)
    cosine = (make.positive(rows, width).detach() * 1.9 - 0.95).requires_grad_()
    total = make.positive(rows, 1)
    size = f"({rows}, {width})"
    return [
        Case(name, plain, safe, inputs, size=size)
        for name, plain, safe, inputs in (
            ("safe_log", lambda p: p.clamp(min=1e-12).log(), ops.safe_log, (p,)),
            ("safe_sqrt", lambda p: p.clamp(min=1e-12).sqrt(), ops.safe_sqrt, (p,)),
            (
                "safe_pow",
                lambda p: p.clamp(min=1e-12).pow(0.3),
                lambda p: ops.safe_pow(p, 0.3),
                (p,),
            ),
            ("safe_acos", lambda c: c.clamp(-1 + 1e-6, 1 - 1e-6).acos(), ops.safe_acos, (cosine,)),
            ("bounded_exp", lambda x: x.clamp(max=40.0).exp(), ops.bounded_exp, (x,)),
            ("hard_cap", lambda x: x.clamp(-2.0, 2.0), lambda x: ops.hard_cap(x, 2.0), (x,)),
            ("soft_cap", lambda x: 2.0 * torch.tanh(x / 2.0), lambda x: ops.soft_cap(x, 2.0), (x,)),
            ("safe_div", lambda x, t: x / (t + 1e-6), ops.safe_div, (x, total)),
            (
                "safe_norm",
                lambda x: x.norm(dim=-1) + 1e-6,
                lambda x: ops.safe_norm(x, -1),
                (x,),
            ),
            ("safe_std", lambda x: x.std(-1) + 1e-6, lambda x: ops.safe_std(x, -1), (x,)),
            (
                "gumbel_noise",
                lambda x: x - torch.log(-torch.log(torch.rand_like(x))),
                lambda x: x + ops.gumbel_noise(x),
                (x,),
            ),
        )
    ]


def diffusion_cases(make: Maker) -> list[Case]:
    """Returns adding noise, and loss weights in the loss they weigh."""
    batch, side = make.rows(64, 32), 64
    x, noise = make.random(batch, 16, side, side), make.random(batch, 16, side, side, grad=False)
    alphas = ops.linear_schedule(device=make.device)
    step, time_ = make.classes(1000, batch), make.positive(batch).detach()
    size = f"{tuple(x.shape)}"

    def plain_noise(x: Tensor) -> Tensor:
        alpha = alphas[step].view(-1, 1, 1, 1)
        return alpha.sqrt() * x + (1 - alpha).sqrt() * noise

    def weighted(weight: Callable[[], Tensor]) -> Form:
        return lambda x: (weight() * (x - noise).square().mean((1, 2, 3))).mean()

    return [
        Case(
            "add_noise",
            plain_noise,
            lambda x: ops.add_noise(x, noise, step, alphas),
            (x,),
            size=size,
        ),
        Case(
            "early_time_weight",
            weighted(lambda: ((time_ + 1) / time_.sqrt()).clamp(max=100.0)),
            weighted(lambda: ops.early_time_weight(time_)),
            (x,),
            size=size,
        ),
        Case(
            "late_time_weight",
            weighted(lambda: ((2 - time_).sqrt() / (1 - time_ + 1e-6).sqrt()).clamp(max=100.0)),
            weighted(lambda: ops.late_time_weight(time_)),
            (x,),
            size=size,
        ),
    ]


def codec_cases(make: Maker) -> list[Case]:
    """Returns the codec: forward only, there is nothing to differentiate."""
    ids = make.classes(151_643, make.rows(4096, 1024), 1024)
    codec = ops.TokenCodec(151_643)

    def plain() -> Tensor:
        pixels = torch.stack((ids % 256, ids // 256 % 256, ids // 65536 % 256), -1).to(torch.uint8)
        digits = pixels.long()
        return digits[..., 0] + 256 * digits[..., 1] + 65536 * digits[..., 2]

    return [
        Case(
            "TokenCodec, there and back",
            plain,
            lambda: codec.decode(codec.encode(ids)),
            (),
            size=f"{tuple(ids.shape)}",
        )
    ]


FAMILIES = (
    norm_cases,
    attention_cases,
    masked_cases,
    label_cases,
    domain_cases,
    diffusion_cases,
    codec_cases,
)


def repeated(form: Form, inputs: tuple[Tensor, ...], device: str) -> Callable[[int], float]:
    """Returns what runs a form some times, forward and backward, and says how long each took."""
    wanted = [x for x in inputs if x.requires_grad]
    grad = None
    if wanted:
        out = form(*inputs)
        grad = torch.randn_like(out) if out.dim() else None

    def run(times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            out = form(*inputs)
            if wanted:
                torch.autograd.grad(out, wanted, grad)
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / times

    return run


def measure(case: Case, device: str, rounds: int, *, compiled: bool = False) -> dict[str, Any]:
    """Measures one op beside its plain form, and beside that form compiled if asked."""
    plain = repeated(case.plain, case.inputs, device)
    safe = repeated(case.safe, case.inputs, device)
    fast = repeated(torch.compile(case.plain), case.inputs, device) if compiled else plain
    for run in (plain, safe, fast):
        run(3)
    # A turn of some 20 ms, so that a wait at its end does not count.
    times = max(int(0.02 / plain(3)), 1)
    ratios, again, took, beside = [], [], [], []
    for _ in range(rounds):
        first, ours, second = plain(times), safe(times), plain(times)
        ratios.append(ours / math.sqrt(first * second))
        again.append(second / first)
        took.append(first)
        if compiled:
            beside.append(ours / fast(times))
    row = {"over_compiled": round(statistics.median(beside), 4)} if compiled else {}
    return {
        "op": case.name,
        "device": device,
        "size": case.size,
        "limit": case.limit,
        "plain_ms": round(statistics.median(took) * 1e3, 4),
        "ratio": round(statistics.median(ratios), 4),
        "spread": [round(min(ratios), 4), round(max(ratios), 4)],
        "again": round(statistics.median(again), 4),
        **row,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as text."""
    head = ["op", "device", "size", "plain ms", "ratio", "limit", "again", "spread", "compiled"]
    body = [
        [
            row["op"],
            row["device"],
            row["size"],
            f"{row['plain_ms']:.3f}",
            f"{row['ratio']:.3f}" + ("" if row["ratio"] <= row["limit"] else " over"),
            f"{row['limit']:.2f}",
            f"{row['again']:.3f}",
            f"{row['spread'][0]:.2f}-{row['spread'][1]:.2f}",
            f"{row['over_compiled']:.3f}" if "over_compiled" in row else "",
        ]
        for row in rows
    ]
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
    lines = [
        " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in [head, *body]
    ]
    return "\n".join([lines[0], "-|-".join("-" * w for w in widths), *lines[1:]])


def measured(device: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures all ops on a device."""
    rows: list[dict[str, Any]] = []
    for family in FAMILIES:
        torch.manual_seed(0)
        for case in family(Maker(device, options.scale)):
            if any(word in case.name for word in options.only):
                rows.append(measure(case, device, options.rounds, compiled=options.compiled))
                print(table(rows[-1:]).splitlines()[-1], flush=True)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return rows


def main() -> None:
    """Measures what this machine can do and prints it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="*", default=[""], help="ops whose name contains a word")
    parser.add_argument("--device", default="all", choices=("all", "cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--scale", type=float, default=1.0, help="of the sizes, to try it out")
    parser.add_argument("--compiled", action="store_true", help="beside torch.compile, too")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--without-kernels", action="store_true", help="ops of torch's own parts")
    options = parser.parse_args()
    if options.without_kernels:
        fused.DEVICE = "nowhere"
    rows: list[dict[str, Any]] = []
    for device in ("cuda", "cpu"):
        if options.device not in ("all", device):
            continue
        if device == "cuda" and not torch.cuda.is_available():
            print("cuda: skipped, there is no CUDA device here")
            continue
        rows += measured(device, options)
    if rows:
        print("\n" + table(rows))
    if options.output:
        write_results(options.output, rows)


if __name__ == "__main__":
    main()
