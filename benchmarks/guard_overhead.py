"""What the guard costs a training step, beside other ways of watching one.

Every ratio compares a method with the bare loop in the same round of the same process: the
methods take turns, so that a clock that changes changes for all of them. Prints a table and,
with ``--output``, writes it as JSON.

    python -m benchmarks.guard_overhead                        # what this machine can do
    python -m benchmarks.guard_overhead --only gpt2 --rounds 12 --output results.json
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import platform
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanguard import Guard, Settings

Batches = list[tuple[Tensor, Tensor]]
# A training loop that pauses after every step.
Steps = Iterator[None]


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attends, then transforms."""
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class Decoder(nn.Module):
    """A decoder-only language model in the shape of GPT-2."""

    def __init__(self, vocab: int, context: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.vocab = vocab
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits."""
        h = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        out: Tensor = self.head(self.norm(h))
        return out


@dataclass(frozen=True)
class Setting:
    """One row of the benchmark."""

    name: str
    device: str
    batch: int
    length: int
    shape: dict[str, int]
    fused: bool
    compiled: bool = False
    limit: float | None = None
    steps: int = 20
    turns: int = 1
    snapshots: bool = False


GPT2 = {"vocab": 50304, "context": 1024, "width": 768, "heads": 12, "depth": 12}
SMALL = {"vocab": 2048, "context": 128, "width": 128, "heads": 4, "depth": 4}
FUSED, FOREACH = True, False
SETTINGS = [
    Setting("gpt2 B=16 T=1024 fused", "cuda", 16, 1024, GPT2, FUSED, limit=1.005, snapshots=True),
    # Where the host is what takes the time, it is noisy: many short turns.
    Setting("gpt2 B=2 T=256 fused", "cuda", 2, 256, GPT2, FUSED, limit=1.03, steps=8, turns=10),
    Setting("gpt2 B=16 T=1024 foreach", "cuda", 16, 1024, GPT2, FOREACH),
    Setting("gpt2 B=16 T=1024 compiled", "cuda", 16, 1024, GPT2, FUSED, compiled=True, limit=1.01),
    Setting("small transformer on CPU, fused", "cpu", 8, 64, SMALL, FUSED, limit=1.03),
    Setting("small transformer on CPU, foreach", "cpu", 8, 64, SMALL, FOREACH, limit=1.03),
]


class Bench:
    """A model, an optimizer, and the ways to train them."""

    def __init__(self, setting: Setting) -> None:
        torch.manual_seed(0)
        self.setting = setting
        self.model = Decoder(**setting.shape).to(setting.device)
        self.call: Callable[[Tensor], Tensor] = self.model
        if setting.compiled:
            self.call = torch.compile(self.model)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=1e-5, fused=setting.fused, foreach=not setting.fused
        )
        size = (setting.batch, setting.length)
        tokens = [torch.randint(0, self.model.vocab, size, device=setting.device) for _ in range(9)]
        self.batches: Batches = list(pairwise(tokens))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns the loss, in bf16 autocast on a GPU."""
        on_gpu = self.setting.device == "cuda"
        with torch.autocast(self.setting.device, dtype=torch.bfloat16, enabled=on_gpu):
            logits = self.call(x)
        return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())

    def data(self, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields so many batches."""
        for i in range(steps):
            yield self.batches[i % len(self.batches)]

    def finish(self) -> None:
        """Steps without asking."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def bare(self, steps: int) -> Steps:
        """The loop without any check."""
        for x, y in self.data(steps):
            self.loss(x, y).backward()
            nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.finish()
            yield

    def host_check(self, steps: int) -> Steps:
        """What people write by hand: look at the loss, then at the norm."""
        for x, y in self.data(steps):
            loss = self.loss(x, y)
            if not torch.isfinite(loss):
                continue
            loss.backward()
            if not torch.isfinite(nn.utils.clip_grad_norm_(self.parameters, 1.0)):
                self.optimizer.zero_grad(set_to_none=True)
                continue
            self.finish()
            yield

    def per_parameter(self, steps: int) -> Steps:
        """The loop over all parameters found in field reports."""
        for x, y in self.data(steps):
            self.loss(x, y).backward()
            for parameter in self.parameters:
                grad = parameter.grad
                if grad is not None and (torch.isnan(grad).any() or torch.isinf(grad).any()):
                    grad.zero_()
            nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.finish()
            yield

    def anomaly_mode(self, steps: int) -> Steps:
        """``torch.autograd.detect_anomaly``."""
        with torch.autograd.detect_anomaly(check_nan=True):
            yield from self.bare(steps)

    def debug_underflow(self, steps: int) -> Steps:
        """``DebugUnderflowOverflow`` of transformers."""
        from transformers.debug_utils import DebugUnderflowOverflow

        before = {module: dict(module._forward_hooks) for module in self.model.modules()}
        with contextlib.redirect_stdout(io.StringIO()):
            DebugUnderflowOverflow(self.model)
            yield from self.bare(steps)
        for module, hooks in before.items():
            module._forward_hooks.clear()
            module._forward_hooks.update(hooks)

    def guarded(self, snapshot_every: int = 0, lag: int | None = None) -> Callable[[int], Steps]:
        """The guard."""
        guard = Guard(
            self.model,
            self.optimizer,
            settings=Settings(snapshot_every=snapshot_every, lag=lag),
        )

        def endless() -> Steps:
            for x, y in guard.watch(self.data(sys.maxsize)):
                guard.backward(self.loss(x, y))
                guard.step(max_norm=1.0)
                yield

        # One epoch for all turns: its beginning and its end are not what is measured here.
        loop = endless()
        return lambda steps: islice(loop, steps)


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Keeps the garbage collector from striking in the middle of a measurement."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def block_time(run: Callable[[int], Steps], steps: int) -> float:
    """Returns milliseconds per step of a whole block on a GPU, as the loop runs in practice."""
    with without_collector():
        torch.cuda.synchronize()
        start = time.perf_counter()
        exhaust(run(steps))
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3 / steps


def turn_times(methods: dict[str, Callable[[int], Steps]], steps: int) -> dict[str, list[float]]:
    """Returns milliseconds of single steps on a CPU, the methods taking turns at every step."""
    runs = {name: run(steps) for name, run in methods.items()}
    times: dict[str, list[float]] = {name: [] for name in methods}
    with without_collector():
        for _ in range(steps):
            for name, run in runs.items():
                start = time.perf_counter()
                next(run)
                times[name].append((time.perf_counter() - start) * 1e3)
    for run in runs.values():
        exhaust(run)
    return times


def exhaust(steps: Steps) -> None:
    """Runs a loop to its end."""
    deque(steps, maxlen=0)


def methods_for(bench: Bench, *, slow: bool) -> dict[str, Callable[[int], Steps]]:
    """Returns what takes turns in one setting."""
    methods: dict[str, Callable[[int], Steps]] = {
        "bare": bench.bare,
        "guard": bench.guarded(),
        "host check": bench.host_check,
    }
    methods["bare again"] = bench.bare
    if bench.setting.snapshots:
        methods["guard + snapshot every 100"] = bench.guarded(snapshot_every=100)
    if slow and not bench.setting.compiled:
        methods["per-parameter isnan/isinf"] = bench.per_parameter
        methods["detect_anomaly"] = bench.anomaly_mode
        with contextlib.suppress(ImportError):
            import transformers.debug_utils  # noqa: F401

            methods["DebugUnderflowOverflow"] = bench.debug_underflow
    return methods


FEW = ("per-parameter isnan/isinf", "detect_anomaly", "DebugUnderflowOverflow")


def measure(setting: Setting, rounds: int, *, slow: bool) -> dict[str, Any]:
    """Measures one setting."""
    bench = Bench(setting)
    methods = methods_for(bench, slow=slow)
    for name, run in methods.items():
        # The second snapshot is the last one that has to ask for memory.
        exhaust(run(205 if "snapshot" in name else 4))
    ratios: dict[str, list[float]] = {name: [] for name in methods}
    bare: list[float] = []
    for turn in range(rounds * setting.turns):
        taking_turns = {n: run for n, run in methods.items() if turn < 3 or n not in FEW}
        if setting.device == "cuda":
            # Snapshots come every 100 updates, so a fair block is a whole hundred.
            took = {
                name: block_time(run, 100 if "snapshot" in name else setting.steps)
                for name, run in taking_turns.items()
            }
        else:
            singles = turn_times(taking_turns, setting.steps)
            took = {name: statistics.median(times) for name, times in singles.items()}
        bare.append(took["bare"])
        for name, milliseconds in took.items():
            ratios[name].append(milliseconds / took["bare"])
    row: dict[str, Any] = {
        "setting": setting.name,
        "limit": setting.limit,
        "bare_ms": round(statistics.median(bare), 3),
        "ratio": {name: round(statistics.median(r), 4) for name, r in ratios.items()},
        "spread": {name: [round(min(r), 4), round(max(r), 4)] for name, r in ratios.items()},
    }
    if setting.device == "cuda":
        row["extra_memory_bytes"] = extra_memory(bench)
    return row


def extra_memory(bench: Bench) -> int:
    """Returns how much more device memory a guarded step needs at its peak, in bytes."""
    peaks = []
    guarded = bench.guarded()
    for run in (bench.bare, guarded):
        exhaust(run(4))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        exhaust(run(8))
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
    return peaks[1] - peaks[0]


def environment(command: str) -> dict[str, str]:
    """Returns what a figure needs beside it to mean anything."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {
        "command": command,
        "device": device,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as text."""
    names = list(dict.fromkeys(name for row in rows for name in row["ratio"]))
    head = ["setting", "bare ms", "limit", *names[1:]]
    body = [
        [
            row["setting"],
            f"{row['bare_ms']:.2f}",
            "" if row["limit"] is None else f"{row['limit']:.3f}",
            *(f"{row['ratio'][name]:.3f}" if name in row["ratio"] else "" for name in names[1:]),
        ]
        for row in rows
    ]
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
    lines = [
        " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in [head, *body]
    ]
    return "\n".join([lines[0], "-|-".join("-" * w for w in widths), *lines[1:]])


def main() -> None:
    """Measures what this machine can do and prints it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="settings whose name contains this")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--fast", action="store_true", help="leave out the slow methods")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    for setting in SETTINGS:
        if options.only not in setting.name:
            continue
        if setting.device == "cuda" and not torch.cuda.is_available():
            print(f"{setting.name}: skipped, there is no CUDA device here")
            continue
        rows.append(measure(setting, options.rounds, slow=not options.fast))
        print(f"{setting.name}: {rows[-1]}", flush=True)
        gc.collect()
        if setting.device == "cuda":
            torch.cuda.empty_cache()
    if rows:
        print("\n" + table(rows))
    if options.output:
        command = f'python -m benchmarks.guard_overhead --only "{options.only}"'
        command += f" --rounds {options.rounds}" + " --fast" * options.fast
        report = {"environment": environment(command), "rows": rows}
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
