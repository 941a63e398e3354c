"""The places in torch that a training step passes through, and how they tell a watcher."""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch._C._functorch import peek_interpreter_stack
from torch._functorch import apis, eager_transforms
from torch.func import debug_unwrap
from torch.optim import Optimizer
from torch.utils._pytree import (
    keystr,
    tree_flatten_with_path,
    tree_leaves,
    tree_map_only,
    tree_structure,
)
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from nanguard.replay.changes import COLLECTIVES
from nanguard.replay.frames import Nobody, Turns
from nanguard.replay.tracer.sites import is_ours

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Watcher(Protocol):
    """Whoever wants to know what a script does."""

    def backward(self, call: Callable[[], Any], tensors: Any) -> Any:
        """Runs a backward pass."""

    def grad(self, call: Callable[[], Any], outputs: Any) -> Any:
        """Computes gradients that are handed to the script, and not kept by parameters."""

    def func_grad(self, found: FuncGradients) -> Any:
        """Returns what the script is given of what ``torch.func`` has computed for it."""

    def read(self, tensor: torch.Tensor, value: Any) -> None:
        """Hears of a number that the script has read from a tensor."""

    def step(self, optimizer: Optimizer, call: Callable[..., Any], closure: Any) -> Any:
        """Runs, or does not run, the step of an optimizer."""

    def scaler_step(self, scaler: Any, optimizer: Any, call: Callable[[], Any]) -> Any:
        """Runs the step of a GradScaler."""

    def scaled(self, scaler: Any, loss: Any) -> None:
        """Hears of a loss that is about to be scaled."""

    def made(self, optimizer: Optimizer) -> None:
        """Hears of a new optimizer."""

    def loaded(self, state: Any) -> None:
        """Hears of state that a module has taken over."""

    def captured(self, optimizer: Optimizer) -> None:
        """Hears of a step that a CUDA graph takes up, and that the device makes by itself."""

    def replayed_graph(self) -> None:
        """Hears that a CUDA graph was replayed."""

    def collective(self) -> None:
        """Hears that the script is about to do something together with other ranks."""

    clip_limit: float | None

    def clipped(self, parameters: list[torch.Tensor], norm: Any) -> None:
        """Hears of gradients that were clipped, and of their norm."""

    def begin_pass(self, loader: Any) -> None:
        """Hears that the script is about to go over a loader."""

    def next_batch(self, own: Any, draw: Callable[[Any], Any]) -> Any:
        """Returns the next batch that the script is given.

        Args:
            own: The loader's iterator.
            draw: Takes a batch from it.
        """

    def choose(self, own: Any, draw: Callable[[Any], Any]) -> Any:
        """Returns which samples of a data set an iterator takes for a batch.

        Args:
            own: The loader's iterator.
            draw: Takes the next ones from its sampler.
        """


@dataclass(frozen=True, slots=True)
class FuncGradients:
    """Gradients that ``torch.func`` has computed, and not as a part of something larger.

    Attributes:
        result: All that was computed.
        alone: Whether that is the gradients and nothing else; otherwise the first part of it is.
            None if nobody knows which part is.
        losses: What they are the gradients of: one number, or one for each sample; None if that is
            not known.
        of: The arguments that they were computed for.
    """

    result: Any
    alone: bool | None
    losses: torch.Tensor | None
    of: Any

    @property
    def gradients(self) -> list[torch.Tensor]:
        """The gradients; all tensors there are, where nobody knows which are gradients."""
        found = self.result[0] if self.alone is False else self.result
        return [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """What they were computed for; nothing where samples are among it."""
        if self.losses is None or self.losses.numel() != 1:
            return {}
        leaves = tree_flatten_with_path(self.of)[0]
        return {keystr(path): t for path, t in leaves if isinstance(t, torch.Tensor)}

    @property
    def loss(self) -> torch.Tensor | None:
        """What they are the gradients of; of several samples, of the first one that is bad."""
        if self.losses is None or self.losses.numel() <= 1:
            return None if self.losses is None else self.losses.detach()
        each = self.losses.detach().reshape(-1)
        return each[int((~each.isfinite()).int().argmax())]

    @property
    def mean(self) -> torch.Tensor | None:
        """What they are the gradients of; of several samples, on average."""
        losses = None if self.losses is None else self.losses.detach()
        return losses if losses is None or losses.numel() == 1 else losses.mean()

    def zeroed(self) -> Any:
        """Returns the same with gradients of 0, which move nothing."""
        if self.alone:
            return tree_map_only(torch.Tensor, torch.zeros_like, self.result)
        first, *others = self.result
        return (tree_map_only(torch.Tensor, torch.zeros_like, first), *others)


_INHERITED = object()
_NOBODY = Nobody()


def comes_from_signal(error: BaseException) -> bool:
    """Returns whether a signal handler of the script has raised an exception.

    It may interrupt nanguard as well as anything else, and is the script's own: that of a
    ``DataLoader`` raises when a worker was killed.
    """
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = {getattr(handler, "__code__", None) for handler in handlers}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


class Patches:
    """Makes torch tell a watcher what happens, until it is taken off.

    Attributes:
        watcher: Who is notified. It can be another one at any time.
    """

    def __init__(
        self, watcher: Watcher, on_left_alone: Callable[[str, str], None] | None = None
    ) -> None:
        """Does nothing yet.

        Args:
            watcher: Who is notified.
            on_left_alone: Called when a thread begins to train while another is within a step, with
                the names of both: the watcher hears nothing more of it. None if it is to hear all.
        """
        self.watcher = watcher
        self._turns = Turns(on_left_alone)
        self._replaying: dict[int, Watcher] = {}
        self._undo: list[tuple[Any, str, Any]] = []

    @property
    def now(self) -> Watcher:
        """Who follows what this thread does: a replay, if it makes one."""
        if not self._replaying and not self._turns.left_any_alone:
            return self.watcher
        if replay := self._replaying.get(threading.get_ident()):
            return replay
        return _NOBODY if self._turns.is_alone() else self.watcher

    @contextlib.contextmanager
    def followed_by(self, watcher: Watcher) -> Iterator[None]:
        """Notifies another watcher of what this thread does; other threads go on."""
        thread = threading.get_ident()
        self._replaying[thread] = watcher
        try:
            yield
        finally:
            del self._replaying[thread]

    def _in_turn(self, what: str, *given: Any) -> Any:
        """Notifies of a backward pass or a step, in which this thread is alone with the watcher."""
        new = self._turns.enter(step=what != "backward")
        try:
            return getattr(self.now, what)(*given)
        finally:
            if new:
                self._turns.leave()

    def put_on(self) -> None:
        """Begins."""
        self._patch_backward()
        self._patch_grad()
        self._patch_func()
        self._patch_reads()
        self._patch_optimizers()
        self._patch_scaler()
        self._patch_clipping()
        self._patch_loader()
        self._patch_state()
        self._patch_graphs()
        self._patch_collectives()

    def take_in(self, optimizers: Iterable[Optimizer]) -> None:
        """Hears of the steps of optimizers that were made before the patches were put on."""
        for optimizer in optimizers:
            kind = type(optimizer)
            step = vars(kind).get("step")
            # Torch hooks the step of a class once, when the first of its optimizers is made.
            new = not any(kind is owner for owner, *_ in self._undo)
            if new and getattr(step, "hooked", False):
                hooked: Any = Optimizer.profile_hook_step(step.__wrapped__)  # type: ignore[union-attr]
                hooked.hooked = True
                self._put(kind, "step", hooked)
            self.now.made(optimizer)

    def take_off(self) -> None:
        """Leaves torch as it was found."""
        for owner, name, original in reversed(self._undo):
            if original is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._undo.clear()

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        self._undo.append((owner, name, vars(owner)[name]))
        setattr(owner, name, new)

    def _put(self, owner: Any, name: str, new: Any) -> None:
        """Puts something before what a class may have inherited."""
        self._undo.append((owner, name, vars(owner).get(name, _INHERITED)))
        setattr(owner, name, new)

    def _patch_backward(self) -> None:
        original = torch.autograd.backward

        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or is_capturing():
                return original(tensors, *args, **kwargs)
            if not isinstance(tensors, (torch.Tensor, list, tuple)):
                tensors = tuple(tensors) if isinstance(tensors, Iterable) else (tensors,)
            if torch._C._current_autograd_node() is not None:
                # A part of another backward, as reentrant checkpointing makes them, maybe in a
                # thread of torch's own.
                return original(tensors, *args, **kwargs)
            return self._in_turn("backward", lambda: original(tensors, *args, **kwargs), tensors)

        self._replace(torch.autograd, "backward", backward)

    def _patch_grad(self) -> None:
        original = torch.autograd.grad

        @functools.wraps(original)
        def grad(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            def call() -> Any:
                return original(outputs, *args, **kwargs)

            # A gradient that is differentiated once more is a part of the loss.
            part = kwargs.get("create_graph") or any(args[2:4])
            running: Any = torch._C._current_autograd_node()
            if part or torch.compiler.is_compiling() or running is not None:
                return call()
            return self.now.grad(call, outputs)

        self._replace(torch.autograd, "grad", grad)

    def _patch_func(self) -> None:
        """Hears of the gradients of ``torch.func``: inside of others they are no step's."""
        one, several = eager_transforms.grad_and_value_impl, apis.vmap_impl  # type: ignore[attr-defined]
        # What gradients inside of vmap look like, and what they are the gradients of.
        inside = threading.local()

        @functools.wraps(one)
        def grad_and_value(func: Any, argnums: Any, has_aux: Any, args: Any, kwargs: Any) -> Any:
            found = one(func, argnums, has_aux, args, kwargs)
            if torch.compiler.is_compiling():
                return found
            loss = found[1][0] if has_aux else found[1]
            if peek_interpreter_stack() is not None:
                if getattr(inside, "batches", False):
                    shapes = (tree_structure(found[0]), tree_structure(found))
                    inside.seen = (shapes, debug_unwrap(loss))
                return found
            given = [args[n] for n in ([argnums] if isinstance(argnums, int) else argnums)]
            return self.now.func_grad(FuncGradients(found, False, loss, given))  # noqa: FBT003

        @functools.wraps(several)
        def vmap(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or peek_interpreter_stack() is not None:
                return several(*args, **kwargs)
            inside.seen, inside.batches = None, True
            try:
                found = several(*args, **kwargs)
            finally:
                seen, inside.seen, inside.batches = inside.seen, None, False
            if seen is None:
                return found
            (shapes, losses), here = seen, tree_structure(found)
            alone = True if here == shapes[0] else False if here == shapes[1] else None
            return self.now.func_grad(FuncGradients(found, alone, losses, args[5:]))

        self._replace(eager_transforms, "grad_and_value_impl", grad_and_value)
        self._replace(apis, "vmap_impl", vmap)

    def _patch_reads(self) -> None:
        for name in ("item", "__float__"):
            original = getattr(torch.Tensor, name)

            @functools.wraps(original)
            def read(tensor: Any, _original: Any = original) -> Any:
                value = _original(tensor)
                if type(value) is not float or value - value == 0.0:
                    return value  # most are finite
                if not is_ours(sys._getframe(1).f_code.co_filename):
                    self.now.read(tensor, value)
                return value

            self._put(torch.Tensor, name, read)

    def _patch_optimizers(self) -> None:
        original = Optimizer.profile_hook_step
        made = Optimizer.__init__

        def profile_hook_step(func: Any) -> Any:
            hooked = original(func)

            @functools.wraps(hooked)
            def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
                if torch.compiler.is_compiling():
                    return hooked(optimizer, *args, **kwargs)
                if is_capturing():
                    self.now.captured(optimizer)
                    return hooked(optimizer, *args, **kwargs)
                closure = kwargs.get("closure", args[0] if args else None)
                if not callable(closure):
                    return self._in_turn(
                        "step", optimizer, lambda: hooked(optimizer, *args, **kwargs), None
                    )

                def call(evaluate: Any = closure) -> Any:
                    if "closure" in kwargs:
                        return hooked(optimizer, *args, **{**kwargs, "closure": evaluate})
                    return hooked(optimizer, evaluate, *args[1:], **kwargs)

                return self._in_turn("step", optimizer, call, closure)

            return step

        @functools.wraps(made)
        def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            kind = type(optimizer)
            own = vars(kind).get("step", _INHERITED)
            made(optimizer, *args, **kwargs)
            if vars(kind).get("step", _INHERITED) is not own:
                self._undo.append((kind, "step", own))
            self.now.made(optimizer)

        self._replace(Optimizer, "profile_hook_step", staticmethod(profile_hook_step))
        self._replace(Optimizer, "__init__", init)

    def _patch_scaler(self) -> None:
        scaler_type = torch.amp.GradScaler
        step, scale = scaler_type.step, scaler_type.scale

        @functools.wraps(step)
        def scaler_step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            def call() -> Any:
                return step(scaler, optimizer, *args, **kwargs)

            if torch.compiler.is_compiling() or is_capturing():
                return call()
            return self._in_turn("scaler_step", scaler, optimizer, call)

        @functools.wraps(scale)
        def scaler_scale(scaler: Any, outputs: Any) -> Any:
            if not torch.compiler.is_compiling():
                self.now.scaled(scaler, outputs)
            return scale(scaler, outputs)

        self._replace(scaler_type, "step", scaler_step)
        self._replace(scaler_type, "scale", scaler_scale)

    def _patch_graphs(self) -> None:
        original = torch.cuda.CUDAGraph.replay

        @functools.wraps(original)
        def replay(graph: Any) -> None:
            original(graph)
            self.now.replayed_graph()

        self._replace(torch.cuda.CUDAGraph, "replay", replay)

    def _patch_collectives(self) -> None:
        """Hears of what ranks do together; what DDP does by itself is not among it."""
        if not dist.is_available():
            return
        for name in COLLECTIVES:
            original = vars(dist.distributed_c10d).get(name)
            if original is not None and vars(dist).get(name) is original:
                wrapped = self._heard_collective(original)
                self._replace(dist.distributed_c10d, name, wrapped)
                self._replace(dist, name, wrapped)

    def _heard_collective(self, original: Any) -> Callable[..., Any]:
        @functools.wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                self.now.collective()
            return original(*args, **kwargs)

        return collective

    def _patch_state(self) -> None:
        original = nn.Module.load_state_dict

        @functools.wraps(original)
        def load(module: nn.Module, state: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(module, state, *args, **kwargs)
            self.now.loaded(state)
            return result

        self._replace(nn.Module, "load_state_dict", load)

    def _patch_clipping(self) -> None:
        original = nn.utils.clip_grad_norm_

        @functools.wraps(original)
        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or is_capturing():
                return original(parameters, *args, **kwargs)
            single = isinstance(parameters, torch.Tensor)
            clipped = [parameters] if single else list(parameters)
            norm = original(clipped, *args, **kwargs)
            limit = args[0] if args else kwargs.get("max_norm")
            self.now.clip_limit = float(limit) if isinstance(limit, (int, float)) else None
            usual = not args[1:] and not set(kwargs) - {"max_norm", "foreach"}
            if usual:
                self.now.clipped(clipped, norm)
            return norm

        self._replace(nn.utils, "clip_grad_norm_", clip)
        self._replace(nn.utils.clip_grad, "clip_grad_norm_", clip)

    def _patch_loader(self) -> None:
        iterate, step, choose = (
            DataLoader.__iter__,
            _BaseDataLoaderIter.__next__,
            _BaseDataLoaderIter._next_index,
        )

        @functools.wraps(iterate)
        def begin(loader: Any) -> Any:
            self.now.begin_pass(loader)
            return iterate(loader)

        @functools.wraps(step)
        def draw(own: Any) -> Any:
            return self.now.next_batch(own, step)

        @functools.wraps(choose)
        def chosen(own: Any) -> Any:
            return self.now.choose(own, choose)

        self._replace(DataLoader, "__iter__", begin)
        self._replace(_BaseDataLoaderIter, "__next__", draw)
        self._replace(_BaseDataLoaderIter, "_next_index", chosen)


def is_capturing() -> bool:
    """Returns whether a CUDA graph is being recorded, in which nothing may be read."""
    # Several times a step, and without a device the first word is the answer.
    return (
        torch.cuda._initialized
        and torch.cuda.is_initialized()
        and torch.cuda.is_current_stream_capturing()
    )
