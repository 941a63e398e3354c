"""A small real training that breaks for known reasons, and the ways to compare two of them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from nanguard import Guard, Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

NAN, INF = float("nan"), float("inf")
# Spikes need a window; these tests are about everything else.
QUIET: dict[str, Any] = {"max_skips": 20, "snapshot_every": 0}


class Net(nn.Module):
    """Linear, BatchNorm, Dropout, Linear: buffers and random numbers in every step."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(F.relu(self.norm(self.first(x)))))


def batches(count: int, seed: int = 1, device: str = "cpu", size: int = 16) -> list[Any]:
    """Returns batches that every run of a test draws alike."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, 8, generator=generator).to(device),
            torch.randint(0, 4, (size,), generator=generator).to(device),
        )
        for _ in range(count)
    ]


def poisoned(data: list[Any], bad: Iterable[int], value: float = NAN) -> list[Any]:
    """Returns the batches with one bad number in each of some."""
    out = [(x.clone(), y) for x, y in data]
    for index in bad:
        out[index][0][3, 5] = value
    return out


def without(data: list[Any], bad: Iterable[int]) -> list[Any]:
    """Returns the batches that are not bad."""
    left_out = set(bad)
    return [batch for index, batch in enumerate(data) if index not in left_out]


Build = "Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]"


def adamw(**options: Any) -> Callable[..., torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, **options)


@dataclass
class Run:
    """A training run: everything that a bad step must leave unchanged."""

    build: Callable[..., torch.optim.Optimizer] = field(default_factory=lambda: adamw(fused=True))
    device: str = "cpu"
    accumulate: int = 1
    step_at_end: bool = False
    max_norm: float | None = 1.0
    model: nn.Module = field(default_factory=Net)
    with_ema: bool = True

    def __post_init__(self) -> None:
        seed_all(0)
        self.model = type(self.model)().to(self.device)
        self.optimizer = self.build(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.SequentialLR(
            self.optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=5),
                torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 100),
            ],
            [5],
        )
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.guard: Guard | None = None

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        # The loop itself draws from every stream, as augmentation and noise do.
        noise = random.random() + float(np.random.rand())
        x = x + 1e-3 * (torch.randn_like(x) + noise)
        return F.cross_entropy(self.model(x), y) / self.accumulate

    def bare(self, data: list[Any]) -> Run:
        """Trains without a guard."""
        for index, batch in enumerate(data):
            self.loss(batch).backward()
            if not self._is_full(index, len(data)):
                continue
            if self.max_norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.ema.update_parameters(self.model)
        return self

    def make_guard(self, **settings: Any) -> Guard:
        run_dir = settings.pop("run_dir", None)
        self.guard = Guard(
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            ema=self.ema,
            run_dir=run_dir,
            settings=Settings(**{**QUIET, **settings}),
        )
        return self.guard

    def guarded(self, data: Iterable[Any], **settings: Any) -> Run:
        """Trains under a guard."""
        guard = self.make_guard(**settings)
        count = len(data) if isinstance(data, list) else 0
        for index, batch in guard.enumerate(data):
            guard.backward(self.loss(batch))
            if self._is_full(index, count):
                guard.step(max_norm=self.max_norm)
        guard.close()
        return self

    def _is_full(self, index: int, count: int) -> bool:
        """Returns whether a batch is the last one of a step."""
        return (index + 1) % self.accumulate == 0 or (self.step_at_end and index + 1 == count)

    def everything(self) -> dict[str, Any]:
        """Returns all that two runs are compared by."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "ema": self.ema.state_dict(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state() if self.device == "cuda" else None,
            "python": random.getstate(),
            "numpy": np.random.get_state()[1],
        }


def take_step(guard: Guard | None, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Takes a step with a guard, or the same step without one."""
    if guard is not None:
        guard.backward(loss)
        guard.step()
        return
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def differences(left: Any, right: Any, path: str = "") -> list[str]:
    """Returns the paths at which two trees differ in a single bit."""
    if isinstance(left, torch.Tensor):
        same = left.shape == right.shape and left.dtype == right.dtype and _bits(left, right)
        return [] if same else [path]
    if isinstance(left, np.ndarray):
        return [] if (left == right).all() else [path]
    if isinstance(left, dict):
        if left.keys() != right.keys():
            return [f"{path} has keys {sorted(map(str, left.keys() ^ right.keys()))}"]
        return [d for key in left for d in differences(left[key], right[key], f"{path}/{key}")]
    if isinstance(left, (list, tuple)):
        if len(left) != len(right):
            return [f"{path} has {len(left)} and {len(right)} items"]
        pairs = enumerate(zip(left, right, strict=True))
        return [d for i, (a, b) in pairs for d in differences(a, b, f"{path}/{i}")]
    return [] if left == right else [f"{path}: {left!r} and {right!r}"]


def _bits(left: Tensor, right: Tensor) -> bool:
    """Returns whether two tensors are equal bit by bit, so that -0.0 is not 0.0."""
    if left.numel() == 0:
        return True
    a, b = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (left, right))
    return torch.equal(a, b)
