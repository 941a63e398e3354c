"""Runs a script and prints where NaN or Inf first comes from finite input, without nanguard.

    python truth.py train.py

The labels of the cases were made on a CPU. Other numbers on another device can make the same
script fail in another place; this says where, by means that share nothing with the tracer. If no
loss and no gradient goes bad, it says nothing: a value that a script gets rid of does no harm.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class First(TorchDispatchMode):
    """Prints the first operation that makes a bad value out of good ones."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path, self.busy = path, False
        self.found: list[str] = []
        self.harmful = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.busy or "empty" in str(func):
            return out
        self.busy = True
        try:
            if _bad(out) and not _bad((args, kwargs)):
                self.found.append(f"FIRST {func} line {self._line()}")
        finally:
            self.busy = False
        return out

    def look(self, values: Any) -> None:
        """Looks at a loss, or at gradients."""
        self.busy = True
        if not self.harmful and _bad(values):
            self.harmful = True
            print("\n".join(self.found), flush=True)
        self.busy = False

    def _line(self) -> int | None:
        frame = sys._getframe()
        while frame is not None and frame.f_code.co_filename != self.path:
            frame = frame.f_back  # type: ignore[assignment]
        return frame.f_lineno if frame else None


def _bad(values: Any) -> bool:
    return any(
        isinstance(leaf, torch.Tensor)
        and leaf.is_floating_point()
        and not bool(torch.isfinite(leaf).all())
        for leaf in tree_leaves(values)
    )


if __name__ == "__main__":
    script = Path(sys.argv[1]).resolve()
    sys.path.insert(0, str(script.parent))
    first = First(str(script))
    backward = torch.autograd.backward

    def looked_at(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        first.look(tensors)
        return backward(tensors, *args, **kwargs)

    torch.autograd.backward = looked_at
    register_optimizer_step_pre_hook(
        lambda optimizer, *_: first.look(
            [p.grad for group in optimizer.param_groups for p in group["params"]]
        )
    )
    with first:
        runpy.run_path(str(script), run_name="__main__")
