"""Which module of which model is running."""

from __future__ import annotations

import gc
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
ROOT = "<root>"
LOSS = "loss"


class _Kinds(dict[type, bool]):
    """Which types are modules; asked once for each of them."""

    def __missing__(self, kind: type) -> bool:
        self[kind] = issubclass(kind, nn.Module)
        return self[kind]


_is_module = _Kinds()


def all_modules() -> list[nn.Module]:
    """Returns every module that is alive in this process."""
    # type() and not isinstance(): some objects run code when they are asked for their class.
    return [o for o in gc.get_objects() if _is_module[type(o)]]


class ModuleNames:
    """Knows modules by their dotted path in the model they belong to."""

    def __init__(self) -> None:
        self._paths: dict[int, str] = {}
        self._losses: list[nn.Module] = []
        self._kept: list[nn.Module] = []

    def path(self, module: nn.Module) -> str:
        """Returns a module's path; ``<root>`` for a model, ``loss`` for what has no parameters."""
        if id(module) not in self._paths:
            self._look()
        return self._paths.get(id(module), ROOT)

    def call_loss(self, module: nn.Module) -> None:
        """Notes that a module computes a loss, although it has parameters."""
        self._losses.append(module)
        self._paths.clear()

    def _look(self) -> None:
        found = all_modules()
        inner = {id(child) for module in found for child in module._modules.values()}
        roots = [module for module in found if id(module) not in inner]
        # Of two models that share a module, the larger one gives it its name.
        roots.sort(key=lambda root: sum(1 for _ in root.modules()))
        for root in roots:
            bare = next(root.parameters(), None) is None
            for name, module in root.named_modules():
                parts = [part for part in name.split(".") if part not in _WRAPPERS]
                if type(root).__name__ == "DistributedDataParallel" and parts[:1] == ["module"]:
                    parts = parts[1:]
                path = ".".join(part for part in parts if part)
                self._paths[id(module)] = LOSS if bare else path or ROOT
        for loss in self._losses:
            self._paths.update({id(module): LOSS for module in loss.modules()})
        self._kept = found  # while they live, nothing else has their ids


class _Calls(threading.local):
    """The modules whose calls have not ended, in each thread."""

    def __init__(self) -> None:
        self.stack: list[nn.Module] = []


class ModuleStack:
    """Follows the calls of modules, while it is active."""

    def __init__(self, on_root: Callable[[nn.Module, Any], None]) -> None:
        self.names = ModuleNames()
        self._calls = _Calls()
        self._on_root = on_root
        self._judged: set[int] = set()
        self._handles: list[Any] = []

    def start(self) -> None:
        """Begins to follow."""
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def stop(self) -> None:
        """Ends it."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._calls = _Calls()

    def current(self, frame: FrameType | None) -> nn.Module | None:
        """Returns the module that is running; None outside of any.

        A method that is called by itself, and not through the module's call, counts too.
        """
        stack = self._calls.stack
        if stack:
            return stack[-1]
        if frame is None:
            return None
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self":
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and code.co_name != "__init__":
                return owner
        return None

    def _enter(self, module: nn.Module, args: Any) -> None:
        stack = self._calls.stack
        # What is computed again in backward was given to the model before.
        if not stack and torch._C._current_autograd_node() is None:
            self._on_root(module, (*args, *keywords(sys._getframe(1)).values()))
        stack.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        stack = self._calls.stack
        if len(stack) == 1 and id(module) not in self._judged:
            self._judged.add(id(module))
            if _is_criterion(args, output):
                self.names.call_loss(module)
        # A module whose call failed half-way has left others above it.
        while stack and stack.pop() is not module:
            pass


def keywords(call: FrameType) -> dict[str, Any]:
    """Returns what a module is given by name, from the frame that calls a hook for all modules.

    Such hooks get the other arguments only. The dict is the one that is handed on.
    """
    found = call.f_locals.get("kwargs")
    return found if type(found) is dict else {}


def _is_criterion(args: Any, output: Any) -> bool:
    """Returns whether a call took what a model had put out and gave back one number."""
    single = isinstance(output, torch.Tensor) and output.dim() == 0
    return single and any(tensor.grad_fn is not None for tensor in tensors_in(args))


def tensors_in(value: Any, depth: int = 4) -> Iterator[Any]:
    """Yields the tensors in nested tuples, lists and dicts, and in simple objects."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, dict):
        for inner in value.values():
            yield from tensors_in(inner, depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for inner in value:
            yield from tensors_in(inner, depth - 1)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)):
        for inner in vars(value).values():
            yield from tensors_in(inner, 0 if not isinstance(inner, torch.Tensor) else 1)
