"""What a replay changes to see whether the step is still bad.

Each change is a context: what it has changed is put back at its end, as the process may be the one
that trains.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib.abc
import importlib.machinery
import io
import linecache
import logging
import sys
import threading
import warnings
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.func import debug_unwrap
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from nanguard.replay.tracer.modules import keywords, tensors_in
from nanguard.replay.tracer.sites import file_of, users_frame
from nanguard.replay.tracer.tensor_values import memory_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType, ModuleType

    from nanguard.replay.watch import Watch

_HALF = (torch.float16, torch.bfloat16)


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    """Makes compiled models run their Python code, so that every operation can be seen."""
    set_stance = getattr(torch.compiler, "set_stance", None)
    with contextlib.ExitStack() as stack:
        if set_stance is not None and "torch._dynamo" in sys.modules:
            stack.enter_context(set_stance("force_eager"))
        yield


def never_compile() -> None:
    """Makes what this process would compile run as it is."""
    for_good(eagerly())
    torch.compile = _not_compiled


def _not_compiled(model: Any = None, **_options: Any) -> Any:
    return (lambda function: function) if model is None else model


def is_compiled() -> bool:
    """Returns whether this process has compiled anything."""
    known = sys.modules.get("torch._dynamo.utils")
    return known is not None and bool(known.counters["frames"])


def leave_workers() -> None:
    """Leaves the workers of loaders alone: they belong to the run, and share its semaphores."""
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    def nothing(self: Any) -> None:
        """Does nothing."""

    _MultiProcessingDataLoaderIter.__del__ = nothing  # type: ignore[method-assign]
    _MultiProcessingDataLoaderIter._shutdown_workers = nothing  # type: ignore[method-assign]


# What ranks do together, by the names that ``torch.distributed`` has for it; and of that what one
# of them can do as if the others had done the same, the values of all being its own.
_GATHERED = ("all_gather", "all_gather_object", "all_gather_into_tensor", "all_gather_single")
_ALIKE = (
    "all_reduce",
    "broadcast",
    "broadcast_object_list",
    "reduce",
    "barrier",
    "monitored_barrier",
)
COLLECTIVES = (
    *_ALIKE,
    *_GATHERED,
    "_all_gather_base",
    "all_gather_coalesced",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "batch_isend_irecv",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "recv",
    "recv_object_list",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "_reduce_scatter_base",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Cuts a rank off from the other ranks, which know nothing of what it does.

    Whatever it did with them would be taken for its part of what they do next.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        yield
        return
    from torch.nn.parallel import DistributedDataParallel

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    own = dict.fromkeys(COLLECTIVES, _refused) | dict.fromkeys(_ALIKE, _nothing)
    own |= dict.fromkeys(_GATHERED, _gather_into) | {"_all_gather_base": _gather_into}
    own |= {"all_gather": _gather_own, "all_gather_object": _gather_own_object}
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(DistributedDataParallel, "forward", forward))
        for name, call in own.items():
            if name in vars(dist):
                stack.enter_context(replaced(dist, name, call))
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    """Puts something else in the place of an attribute, for a while."""
    before = vars(owner)[name]
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drops what this thread prints, logs and warns of."""
    thread = threading.get_ident()

    def dropped(call: Callable[..., Any]) -> Callable[..., Any]:
        def silent(*args: Any, **kwargs: Any) -> Any:
            return None if threading.get_ident() == thread else call(*args, **kwargs)

        return silent

    streams = sys.stdout, sys.stderr
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(logging.Logger, "handle", dropped(logging.Logger.handle)))
        shown = warnings._showwarnmsg  # type: ignore[attr-defined]
        stack.enter_context(replaced(warnings, "_showwarnmsg", dropped(shown)))
        sys.stdout, sys.stderr = (_Silent(stream, thread) for stream in streams)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = streams


class _Silent(io.TextIOBase):
    """A stream that drops what one thread writes."""

    def __init__(self, stream: Any, thread: int) -> None:
        self._stream = stream
        self._thread = thread

    def write(self, text: str) -> int:
        """Writes, unless it is the thread that is to be silent."""
        if threading.get_ident() == self._thread:
            return len(text)
        return int(self._stream.write(text))

    def flush(self) -> None:
        """Flushes what others have written."""
        if threading.get_ident() != self._thread:
            self._stream.flush()

    def fileno(self) -> int:
        """Returns what the stream itself does."""
        return int(self._stream.fileno())

    def isatty(self) -> bool:
        """Returns what the stream itself does."""
        return bool(self._stream.isatty())

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """What the stream itself has."""
        return str(self._stream.encoding)


class _Done:
    """What an asynchronous collective returns."""

    def wait(self, *_args: Any) -> bool:
        """Returns at once."""
        return True

    def is_completed(self) -> bool:
        """Returns that it is done."""
        return True


def _nothing(*_args: Any, async_op: bool = False, **_kwargs: Any) -> Any:
    return _Done() if async_op else None


def _gather_own(into: Any, tensor: Any, *_args: Any, async_op: bool = False, **_kw: Any) -> Any:
    for place in into:
        place.copy_(tensor)
    return _Done() if async_op else None


def _gather_into(into: Any, tensor: Any, *_args: Any, async_op: bool = False, **_kw: Any) -> Any:
    into.copy_(tensor.repeat(into.numel() // tensor.numel(), *[1] * tensor.dim()).view_as(into))
    return _Done() if async_op else None


def _refused(*_args: Any, **_kwargs: Any) -> Any:
    raise RuntimeError("one rank alone cannot replay what it does together with others")


def _gather_own_object(into: Any, value: Any, *_args: Any, **_kwargs: Any) -> None:
    into[:] = [value] * len(into)


def _running() -> set[Any]:
    """Returns the code that this thread is in."""
    found: set[Any] = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found.add(frame.f_code)
        frame = frame.f_back
    return found


def _codes(text: str, path: str) -> dict[tuple[str, int], CodeType]:
    """Returns the code of every function in a source, by its name and first line."""
    found: dict[tuple[str, int], CodeType] = {}
    todo = [compile(text, path, "exec", dont_inherit=True)]
    while todo:
        code = todo.pop()
        found[(code.co_name, code.co_firstlineno)] = code
        todo += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    return found


_PARTS = ("co_code", "co_consts", "co_names", "co_varnames")


def _alike(one: CodeType, other: CodeType) -> bool:
    # Another name at the same place gives the same instructions.
    return all(getattr(one, part) == getattr(other, part) for part in _PARTS)


def _alike_but_for_inner(one: CodeType, other: CodeType) -> bool:
    """Returns whether two pieces of code differ in nothing but the functions they define."""
    consts = [[c for c in code.co_consts if type(c) is not CodeType] for code in (one, other)]
    same = one.co_code == other.co_code and one.co_names == other.co_names
    return same and consts[0] == consts[1]


@contextlib.contextmanager
def swapped_code(sources: dict[str, str], own: CodeType | None = None) -> Iterator[None]:
    """Gives functions of changed files their new code; those that are running keep the old one.

    Args:
        sources: The changed texts, by path.
        own: Code that is changed in another way, also where it is running.

    Raises:
        RuntimeError: The change is in code that is running.
    """
    functions = [o for o in gc.get_objects() if type(o) is FunctionType]
    changed: list[tuple[FunctionType, CodeType, CodeType]] = []
    running = _running()
    for path, text in sources.items():
        # Compared as compiled now: code that is running may look different.
        was, fresh = _codes(source_text(path), path), _codes(text, path)
        for function in functions:
            old = function.__code__
            key = (old.co_name, old.co_firstlineno)
            new = fresh.get(key)
            if old.co_filename != path or new is None or new.co_freevars != old.co_freevars:
                continue
            if old is own:
                continue
            if old in running and key in was and _alike_but_for_inner(was[key], new):
                continue  # such as the module itself: what it has defined is a function by now
            if key not in was or not _alike(was[key], new):
                changed.append((function, old, new))
    mine = own is not None and own.co_filename in sources
    if {old for _, old, _ in changed} & running or not (changed or mine):
        raise RuntimeError("the change is in code that is already running")
    try:
        for function, _, new in changed:
            function.__code__ = new
        yield
    finally:
        for function, old, _ in changed:
            function.__code__ = old


def source_text(path: str) -> str:
    """Returns the text of a file as this process knows it, which may have changed since."""
    return "".join(linecache.getlines(path)) or Path(path).read_text(encoding="utf-8")


# Contexts that last as long as the process. One that nobody holds would end at once.
_entered = contextlib.ExitStack()


def for_good(context: contextlib.AbstractContextManager[None]) -> None:
    """Enters a context for the rest of this process."""
    _entered.enter_context(context)


@contextlib.contextmanager
def wider(dtype: torch.dtype, watch: Watch) -> Iterator[None]:
    """Computes everything in a wider type: parameters, buffers, optimizer state, inputs."""
    narrow = _HALF if dtype == torch.float32 else (*_HALF, torch.float32)
    state = [s for o in watch.optimizers() for s in o.state.values()]
    tensors = [*watch.named_parameters().values(), *watch.buffers().values(), *tensors_in(state)]
    before = [(t, t.data, t.grad) for t in tensors if t.dtype in narrow]

    def widened(value: Any) -> Any:
        narrower = isinstance(value, torch.Tensor) and value.dtype in narrow
        return value.to(dtype) if narrower else value

    def widen_inputs(_module: nn.Module, args: Any) -> Any:
        named = keywords(sys._getframe(1))
        named.update({name: widened(value) for name, value in named.items()})
        return tuple(map(widened, args))

    default = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        for tensor, data, gradient in before:
            tensor.data = data.to(dtype)
            if gradient is not None:
                tensor.grad = gradient.to(dtype)
        stack.callback(_put_back, before)
        if dtype == torch.float64:
            torch.set_default_dtype(dtype)
            stack.callback(torch.set_default_dtype, default)
        stack.callback(register_module_forward_pre_hook(widen_inputs).remove)
        stack.enter_context(without_autocast())
        stack.enter_context(_Wider(dtype, narrow))
        yield


def _put_back(before: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]) -> None:
    for tensor, data, gradient in before:
        tensor.grad = None
        tensor.data = data
        tensor.grad = gradient


class _Wider(TorchFunctionMode):
    """Hears a wider type wherever a script names a narrow one."""

    def __init__(self, dtype: torch.dtype, narrow: tuple[torch.dtype, ...]) -> None:
        super().__init__()
        self._dtype = dtype
        self._narrow = narrow
        self._casts = {torch.Tensor.half, torch.Tensor.bfloat16}
        if torch.float32 in narrow:
            self._casts.add(torch.Tensor.float)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in self._casts:
            return args[0].to(self._dtype)
        if func is torch.empty and args[:1] == ((0,),):
            return func(*args, **(kwargs or {}))  # what a file holds is loaded as it is
        named = {name: self._heard(value) for name, value in (kwargs or {}).items()}
        return func(*map(self._heard, args), **named)

    def _heard(self, value: Any) -> Any:
        return self._dtype if type(value) is torch.dtype and value in self._narrow else value


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Makes every autocast inside do nothing."""
    enter = torch.autocast.__enter__
    # One that is entered for every call, as Accelerate's is, goes on after this.
    were: dict[int, tuple[Any, bool]] = {}

    def disabled(self: Any) -> Any:
        were.setdefault(id(self), (self, self._enabled))
        self._enabled = False
        return enter(self)  # type: ignore[no-untyped-call]

    torch.autocast.__enter__ = disabled  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__ = enter  # type: ignore[method-assign]
        for autocast, enabled in were.values():
            autocast._enabled = enabled


@contextlib.contextmanager
def replaced_samples(samples: Sequence[int], *, targets_only: bool) -> Iterator[None]:
    """Overwrites samples of the next batch with a good one, wherever the script keeps them.

    Args:
        samples: Which ones.
        targets_only: Whether what the model is given stays as it is.
    """
    done = False
    written: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    def before(_module: nn.Module, args: Any) -> None:
        nonlocal done
        named = keywords(sys._getframe(1)).values()
        given = [plain for t in tensors_in([*args, *named]) if (plain := debug_unwrap(t)).dim()]
        if done or not given:
            return
        done = True
        found = [debug_unwrap(t) for t in _tensors_around()] + ([] if targets_only else given)
        entered = {memory_of(tensor) for tensor in given}
        if targets_only:
            found = [t for t in found if memory_of(t) not in entered]
        # A function that is differentiated or batched may not write to what it is given.
        with temporarily_clear_interpreter_stack():
            _replace_rows(found, samples, given[0].shape[0], written)

    hook = register_module_forward_pre_hook(before)
    with contextlib.ExitStack() as stack:
        stack.callback(_unwrite, written)
        stack.callback(hook.remove)
        yield


def _unwrite(written: list[tuple[torch.Tensor, torch.Tensor, int]]) -> None:
    with torch.no_grad():
        for tensor, was, version in reversed(written):
            tensor.copy_(was)
            set_version(tensor, version)


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Gives a tensor the version that it had before; nothing else makes autograd accept it."""
    setter = torch._C._autograd._unsafe_set_version_counter
    try:
        setter((tensor,), (version,))
    except TypeError:  # torch before 2.6 takes one at a time
        setter(tensor, version)  # type: ignore[arg-type]


def _tensors_around() -> list[torch.Tensor]:
    """Returns the tensors that the user's code has names for, in the frames that are running."""
    found: dict[int, torch.Tensor] = {}
    frame = users_frame(sys._getframe(1))
    while frame is not None:
        for value in list(frame.f_locals.values()):
            if not issubclass(type(value), nn.Module):
                found.update({id(tensor): tensor for tensor in tensors_in(value, 2)})
        frame = users_frame(frame.f_back)
    return list(found.values())


def _replace_rows(
    tensors: Sequence[torch.Tensor],
    samples: Sequence[int],
    size: int,
    written: list[tuple[torch.Tensor, torch.Tensor, int]] | None = None,
) -> None:
    """Overwrites samples with a good one, in every tensor that has one row for each."""
    good = next((row for row in range(size) if row not in samples), None)
    if good is None:
        return
    with torch.no_grad():
        for tensor in tensors:
            if tensor.dim() and tensor.shape[0] == size and not tensor.requires_grad:
                if not all(tensor.stride()):
                    continue  # it repeats what it has, and so has no values of its own to write to
                for row in samples:
                    if written is not None:
                        written.append((tensor[row], tensor[row].clone(), tensor._version))
                    tensor[row] = tensor[good].clone()


def without(batch: Any, samples: Sequence[int]) -> Any:
    """Returns a copy of a batch in which some samples are replaced by a good one."""
    batch = copy.deepcopy(batch)
    tensors = [tensor for tensor in tensors_in(batch) if tensor.dim()]
    if tensors:
        _replace_rows(tensors, samples, tensors[0].shape[0])
    return batch


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads changed sources in place of the files."""

    def __init__(self, sources: dict[str, str]) -> None:
        self._sources = sources

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds a module whose file was changed."""
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.origin not in self._sources:
            return None
        spec.loader = self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Leaves it to Python."""

    def exec_module(self, module: ModuleType) -> None:
        """Runs the changed source."""
        origin = str(module.__spec__.origin) if module.__spec__ else ""
        exec(compile(self._sources[origin], origin, "exec", dont_inherit=True), vars(module))  # noqa: S102 - the user's own program


def run_main(sources: dict[str, str]) -> None:
    """Runs the user's program from its first line, with changed sources."""
    sys.meta_path.insert(0, _Changed(sources))
    for name, module in list(sys.modules.items()):
        changed = file_of(module) in sources
        if name != "__main__" and (changed or _half_loaded(name, module)):
            del sys.modules[name]
    main: Any = sys.modules["__main__"]
    path = main.__file__
    text = sources.get(path) or sources.get(str(Path(path).resolve())) or Path(path).read_text()
    kept = {
        name: value
        for name, value in vars(main).items()
        if name.startswith("__") and name.endswith("__")
    }
    vars(main).clear()
    vars(main).update(kept)
    exec(compile(text, path, "exec", dont_inherit=True), vars(main))  # noqa: S102 - the user's own program


def _half_loaded(name: str, module: ModuleType) -> bool:
    """Returns whether the program is in the middle of this module, where it first needed torch."""
    if name.partition(".")[0] in ("torch", "nanguard"):
        return False
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
