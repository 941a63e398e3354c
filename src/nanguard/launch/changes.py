"""What a replay changes to see whether the step is still bad.

It happens in a process of its own, which ends with the answer, so nothing has to be put back.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib.abc
import importlib.machinery
import sys
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from nanguard.numerics import is_float
from nanguard.tracer.modules import keywords, tensors_in
from nanguard.tracer.sites import users_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType, ModuleType

    from nanguard.launch.watch import Watch

_HALF = (torch.float16, torch.bfloat16)


def run_eagerly() -> None:
    """Makes compiled models run their Python code, so that every operation can be seen."""
    set_stance = getattr(torch.compiler, "set_stance", None)
    if set_stance is not None and "torch._dynamo" in sys.modules:
        set_stance("force_eager")
    torch.compile = _not_compiled


def _not_compiled(model: Any = None, **_options: Any) -> Any:
    return (lambda function: function) if model is None else model


def leave_workers() -> None:
    """Leaves the workers of loaders alone: they belong to the run, and share its semaphores."""
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    def nothing(self: Any) -> None:
        """Does nothing."""

    _MultiProcessingDataLoaderIter.__del__ = nothing  # type: ignore[method-assign]
    _MultiProcessingDataLoaderIter._shutdown_workers = nothing  # type: ignore[method-assign]


def refuse_workers(refuse: Callable[[str], None]) -> None:
    """Lets nobody take a batch from the workers of the run."""
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    def refused(_self: Any) -> Any:
        refuse("batches of a loader's workers cannot be had a second time")

    _MultiProcessingDataLoaderIter._next_data = refused  # type: ignore[method-assign]


def go_alone() -> None:
    """Cuts a copy of a rank off from the other ranks, which know nothing of it."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return
    from torch.nn.parallel import DistributedDataParallel

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    DistributedDataParallel.forward = forward  # type: ignore[method-assign]
    for name in ("all_reduce", "broadcast", "reduce", "barrier", "monitored_barrier"):
        setattr(dist, name, _nothing)
    dist.all_gather = _gather_own  # type: ignore[assignment]
    dist.all_gather_object = _gather_own_object  # type: ignore[assignment]
    dist.broadcast_object_list = _nothing


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


def _alike(one: CodeType, other: CodeType) -> bool:
    return (one.co_code, one.co_consts) == (other.co_code, other.co_consts)


def _alike_but_for_inner(one: CodeType, other: CodeType) -> bool:
    """Returns whether two pieces of code differ in nothing but the functions they define."""
    consts = [[c for c in code.co_consts if type(c) is not CodeType] for code in (one, other)]
    return one.co_code == other.co_code and consts[0] == consts[1]


@contextlib.contextmanager
def swapped_code(sources: dict[str, str]) -> Iterator[None]:
    """Gives functions of changed files their new code; those that are running keep the old one."""
    functions = [o for o in gc.get_objects() if type(o) is FunctionType]
    changed: list[tuple[FunctionType, CodeType, CodeType]] = []
    running = _running()
    for path, text in sources.items():
        # Compared as compiled now: code that is running may look different.
        was, fresh = _codes(Path(path).read_text(encoding="utf-8"), path), _codes(text, path)
        for function in functions:
            old = function.__code__
            key = (old.co_name, old.co_firstlineno)
            new = fresh.get(key)
            if old.co_filename != path or new is None or new.co_freevars != old.co_freevars:
                continue
            if old in running and key in was and _alike_but_for_inner(was[key], new):
                continue  # such as the module itself: what it has defined is a function by now
            if key not in was or not _alike(was[key], new):
                changed.append((function, old, new))
    if not changed or {old for _, old, _ in changed} & running:
        raise RuntimeError("the change is in code that is already running")
    try:
        for function, _, new in changed:
            function.__code__ = new
        yield
    finally:
        for function, old, _ in changed:
            function.__code__ = old


# Contexts that last as long as the process. One that nobody holds would end at once.
_entered = contextlib.ExitStack()


def for_good(context: contextlib.AbstractContextManager[None]) -> None:
    """Enters a context for the rest of this process."""
    _entered.enter_context(context)


def raise_precision(dtype: torch.dtype, watch: Watch) -> None:
    """Computes everything in a wider type: parameters, buffers, optimizer state, inputs."""
    for_good(without_autocast())
    for tensor in [*watch.named_parameters().values(), *watch.buffers().values()]:
        _widen(tensor, dtype)
    for optimizer in watch.optimizers():
        for state in optimizer.state.values():
            for tensor in tensors_in(state):
                _widen(tensor, dtype)
    narrow = _HALF if dtype == torch.float32 else (*_HALF, torch.float32)

    def to_wide(self: Any, *_args: Any, **_kwargs: Any) -> Any:
        return self.to(dtype)

    _remember_storages()
    torch.Tensor.half = torch.Tensor.bfloat16 = to_wide  # type: ignore[method-assign]
    nn.Module.half = nn.Module.bfloat16 = to_wide  # type: ignore[method-assign]
    torch.float16 = torch.half = torch.bfloat16 = dtype
    if dtype == torch.float64:
        torch.set_default_dtype(dtype)
        torch.Tensor.float = to_wide  # type: ignore[method-assign]
        nn.Module.float = to_wide  # type: ignore[method-assign]
        torch.float32 = torch.float = dtype

    unscale = torch.amp.GradScaler._unscale_grads_

    def unscale_any(self: Any, optimizer: Any, inv_scale: Any, found: Any, _fp16: bool) -> Any:  # noqa: FBT001
        # What it takes for float16 is float32 now.
        return unscale(self, optimizer, inv_scale, found, True)  # noqa: FBT003

    torch.amp.GradScaler._unscale_grads_ = unscale_any  # type: ignore[method-assign,assignment]

    def widened(value: Any) -> Any:
        narrower = isinstance(value, torch.Tensor) and value.dtype in narrow
        return value.to(dtype) if narrower else value

    def widen_inputs(_module: nn.Module, args: Any) -> Any:
        named = keywords(sys._getframe(1))
        named.update({name: widened(value) for name, value in named.items()})
        return tuple(map(widened, args))

    register_module_forward_pre_hook(widen_inputs)


def _remember_storages() -> None:
    """Lets torch make its tables of types while they have their names: it loads files by them."""
    for table in ("_dtype_to_storage_type_map", "_storage_type_to_dtype_map"):
        getattr(torch.storage, table, dict)()


def _widen(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if is_float(tensor) and not tensor.is_complex():
        tensor.data = tensor.data.to(dtype)
        if tensor.grad is not None:
            tensor.grad.data = tensor.grad.data.to(dtype)


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


def replace_samples(samples: Sequence[int], *, targets_only: bool) -> None:
    """Overwrites samples of the next batch with a good one, wherever the script keeps them.

    Args:
        samples: Which ones.
        targets_only: Whether what the model is given stays as it is.
    """
    done = False

    def before(_module: nn.Module, args: Any) -> None:
        nonlocal done
        named = keywords(sys._getframe(1)).values()
        given = [tensor for tensor in tensors_in([*args, *named]) if tensor.dim()]
        if done or not given:
            return
        done = True
        found = _tensors_around() + ([] if targets_only else given)
        entered = {tensor.untyped_storage().data_ptr() for tensor in given}
        if targets_only:
            found = [t for t in found if t.untyped_storage().data_ptr() not in entered]
        _replace_rows(found, samples, given[0].shape[0])

    register_module_forward_pre_hook(before)


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


def _replace_rows(tensors: Sequence[torch.Tensor], samples: Sequence[int], size: int) -> None:
    """Overwrites samples with a good one, in every tensor that has one row for each."""
    good = next((row for row in range(size) if row not in samples), None)
    if good is None:
        return
    with torch.no_grad():
        for tensor in tensors:
            if tensor.dim() and tensor.shape[0] == size and not tensor.requires_grad:
                for row in samples:
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
        changed = getattr(module, "__file__", None) in sources
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
