"""Plain Python state that a replay reaches, and how it is put back.

A step counts, appends, caches and logs. A replay does so once more, and the run must not notice.
So before a replay everything that its code can reach from the names it is given is remembered, one
level deep each: what an object's attributes, a list's items and a closure's variables were. Objects
with means of their own (modules' buffers, optimizers' state, loaders, random streams) are put back
by those.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import functools
import io
import sys
import weakref
from collections import OrderedDict, deque
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    MethodType,
    ModuleType,
)
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from nanguard.replay.changes import set_version
from nanguard.replay.channels import StandIn, is_channel, spared_function
from nanguard.replay.start import copied, is_plain_object
from nanguard.replay.tracer.sites import is_part_of_script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

# Objects that are looked at, and how far from the names they may be. More than that is not walked
# through in a moment, and whatever a step changes is near.
_OBJECTS = 20_000
_DEPTH = 12
# Objects of the script whose attributes every step remembers.
_OWN_OBJECTS = 8
# Items of a container that are looked at one by one: a longer one holds data, not state.
_ITEMS = 1000
# Bytes of tensors that are copied, in case a replay writes to them.
_COPIED = 64 << 20
# What belongs to other threads, or has nothing to do with the numbers of a step.
_FOREIGN = (
    "threading", "_thread", "queue", "multiprocessing", "concurrent", "asyncio", "logging",
    "tensorboard", "torch.utils.tensorboard", "wandb", "tqdm", "socket", "subprocess", "io", "_io",
    "weakref", "re", "ctypes", "torch._dynamo", "torch._inductor", "torch.distributed", "torch.fx",
    "nanguard", "rich",
)  # fmt: skip
_PLAIN = (
    int, float, complex, str, bytes, bool, type(None), range, slice, BuiltinFunctionType, CodeType,
    FrameType, torch.dtype, torch.device, torch.Size, torch.Generator,
)  # fmt: skip
# Iterators whose copies go on by themselves.
_COPIES = ("list_iterator", "tuple_iterator", "range_iterator", "longrange_iterator", "count")


class RefusedError(RuntimeError):
    """A replay would take from an iterator what the run has not had yet."""


class Reachable:
    """What can be reached from some values, and how it was.

    Attributes:
        complete: Whether all of it was looked at.
    """

    def __init__(self, roots: Iterable[Any], modules: Iterable[dict[str, Any]]) -> None:
        self.complete = True
        # What Python itself keeps there is nobody's state.
        self._seen: dict[int, Any] = {id(vars(builtins)): None, id(sys.modules): None}
        self._undo: list[Callable[[], None]] = []
        self._tensors: list[tuple[Any, int, Any]] = []
        # Where something lies that is used up, or written to, by using it.
        self._used: list[tuple[Any, Any, Any]] = []
        self._room = _COPIED
        todo: deque[tuple[Any, int]] = deque((root, 0) for root in roots)
        for names in modules:
            self._remember_dict(names)
            values = [value for name, value in names.items() if name != "__builtins__"]
            todo.extend((value, _DEPTH - 2) for value in values)
        while todo:
            if len(self._seen) >= _OBJECTS:
                self.complete = False
                break
            value, depth = todo.popleft()
            if type(value) in _PLAIN or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            if depth < _DEPTH:
                todo.extend((inner, depth + 1) for inner in self._led_to(value))

    def keep(self, every: list[dict[Any, Any]]) -> None:
        """Remembers what some names stand for, and does not look into it: a data set is large."""
        for names in every:
            if id(names) not in self._seen:
                self._seen[id(names)] = names
                self._undo.append(_Items(names))

    @contextlib.contextmanager
    def spared(self, *, given: bool) -> Iterator[None]:
        """Puts something else in the place of what a replay must not use.

        Args:
            given: As for ``spare``.
        """
        stand_ins = {id(value): spare(value, given=given) for _, _, value in self._used}
        for holder, key, value in self._used:
            if _held_at(holder, key) is value:
                _hold_at(holder, key, stand_ins[id(value)])
        try:
            yield
        finally:
            for holder, key, value in self._used:
                if _held_at(holder, key) is stand_ins[id(value)]:
                    _hold_at(holder, key, value)

    def put_back(self, *, tensors: bool = True) -> None:
        """Puts everything back to how it was.

        Args:
            tensors: Whether the values of tensors go back, too.
        """
        for undo in self._undo:
            undo()
        if not tensors:
            return
        with torch.no_grad():
            for tensor, version, before in self._tensors:
                if tensor._version != version and before is not None:
                    tensor.copy_(before)
                    set_version(tensor, version)

    def _led_to(self, value: Any) -> Iterable[Any]:
        """Remembers an object, if it lets itself be looked at; returns what it leads to."""
        try:
            return list(self._remember(value))
        except Exception:  # noqa: BLE001 - objects may run any code when they are looked at
            return ()

    def _remember(self, value: Any) -> Iterable[Any]:
        """Remembers an object; returns what it leads to."""
        if isinstance(value, torch.Tensor):
            self._remember_tensor(value)
            return ()
        kind = type(value)
        if kind.__name__ in ("ndarray", "memmap") and kind.__module__ == "numpy":
            self._remember_array(value)
            return ()
        if isinstance(value, io.IOBase):
            self._remember_place(value)
            return ()
        if kind is CellType:
            return self._remember_cell(value)
        if kind is FunctionType:
            return value.__closure__ or ()
        if kind is MethodType:
            return (value.__self__, value.__func__)
        if kind is functools.partial:
            return (value.func, *value.args, *value.keywords.values())
        if kind is ModuleType or _is_foreign(kind):
            return ()
        if isinstance(value, type):
            return self._remember_class(value)
        return self._remember_object(value)

    def _remember_object(self, value: Any) -> Iterable[Any]:
        if isinstance(value, (Dataset, DataLoader, _BaseDataLoaderIter)):
            return ()
        found: list[Any] = []
        if isinstance(value, dict):
            self._remember_dict(value)
            # A class of its own may make its values when it is asked for them.
            found += dict.values(value) if len(value) <= _ITEMS else ()
        elif isinstance(value, (list, deque)):
            self._remember_list(value)
            found += value if len(value) <= _ITEMS else ()
        elif isinstance(value, (set, bytearray)):
            self._remember_set(value)
        elif isinstance(value, tuple):
            found += value[:_ITEMS]
        found += self._remember_attributes(value)
        return found

    def _remember_attributes(self, value: Any) -> list[Any]:
        found: list[Any] = []
        own = getattr(value, "__dict__", None)
        if type(own) is dict:
            self._remember_dict(own)
            found += [v for k, v in own.items() if not _has_own_means(value, k)]
        for cls in type(value).__mro__:
            for name in _slots(cls):
                with contextlib.suppress(AttributeError):
                    inner = getattr(value, name)
                    self._undo.append(_Slot(value, name, inner))
                    found.append(inner)
        return found

    def _remember_dict(self, names: dict[Any, Any]) -> None:
        self._undo.append(_Items(names))
        self._look_for_used(names, dict.items(names))

    def _look_for_used(self, holder: Any, inside: Iterable[tuple[Any, Any]]) -> None:
        for key, value in inside:
            if spare(value, given=False) is not value:
                self._used.append((holder, key, value))

    def _remember_place(self, file: Any) -> None:
        """Remembers how far a file was read."""
        try:
            place = file.tell() if file.seekable() else None
        except (OSError, ValueError):  # in the middle of its lines, or closed
            return
        if place is not None:
            self._undo.append(lambda: file.tell() == place or file.seek(place))

    def _remember_list(self, items: Any) -> None:
        before = list(items)

        def undo() -> None:
            if len(items) != len(before) or any(a is not b for a, b in zip(items, before)):  # noqa: B905
                items.clear()
                items.extend(before)

        self._undo.append(undo)
        if len(before) <= _ITEMS:
            self._look_for_used(items, enumerate(before))

    def _remember_set(self, items: Any) -> None:
        before = copy.copy(items)

        def undo() -> None:
            if items != before:
                items.clear()
                items.extend(before) if isinstance(items, bytearray) else items.update(before)

        self._undo.append(undo)

    def _remember_cell(self, cell: CellType) -> Iterable[Any]:
        try:
            before = cell.cell_contents
        except ValueError:  # empty
            return ()

        def undo() -> None:
            cell.cell_contents = before

        self._undo.append(undo)
        self._look_for_used(cell, [("", before)])
        return (before,)

    def _remember_class(self, cls: type) -> Iterable[Any]:
        if not is_part_of_script(sys.modules.get(cls.__module__)):
            return ()
        before = {k: v for k, v in vars(cls).items() if type(v) in (int, float, bool, str, list)}

        def undo() -> None:
            for name, value in before.items():
                if vars(cls).get(name) is not value:
                    setattr(cls, name, value)

        self._undo.append(undo)
        return list(before.values())

    def _remember_array(self, array: Any) -> None:
        if array.dtype.hasobject or not array.flags.writeable or array.nbytes > self._room:
            return
        self._room -= array.nbytes
        before = array.copy()

        def undo() -> None:
            # Compared as bytes: NaN is not equal to itself.
            if array.tobytes() != before.tobytes():
                array[...] = before

        self._undo.append(undo)

    def _remember_tensor(self, tensor: Any) -> None:
        if isinstance(tensor, torch.nn.Parameter) or tensor.is_inference() or tensor.grad_fn:
            return
        if tensor.layout is not torch.strided or tensor.is_meta:
            return
        size = tensor.numel() * tensor.element_size()
        if size <= self._room:
            self._room -= size
            self._tensors.append((tensor, tensor._version, tensor.detach().clone()))


class ScriptObjects:
    """What the script's own objects hold, and numbers that models keep in plain attributes.

    Which numbers models change while they are called is looked for after 1, 2, 4, 8, ... steps:
    most models have none.
    """

    def __init__(self, models: Callable[[], list[nn.Module]]) -> None:
        self._models = models
        self._objects: list[Any] = []
        self._steps = 0
        self._seen: weakref.WeakKeyDictionary[nn.Module, dict[str, float]]
        self._seen = weakref.WeakKeyDictionary()
        self._changing: weakref.WeakKeyDictionary[nn.Module, list[str]]
        self._changing = weakref.WeakKeyDictionary()

    def know(self, values: list[Any]) -> None:
        """Learns which of some values are objects of the script's own."""
        objects = {id(v): v for v in (*self._objects, *filter(is_plain_object, values))}
        self._objects = list(objects.values())[:_OWN_OBJECTS]

    def step_ended(self) -> None:
        """Looks for numbers that models change, now and then."""
        self._steps += 1
        if self._steps & (self._steps - 1) == 0:
            self._look()

    def _look(self) -> None:
        for module in (module for model in self._models() for module in model.modules()):
            if type(module).__module__.startswith("torch."):
                continue
            numbers = {n: v for n, v in vars(module).items() if type(v) in (int, float)}
            before = self._seen.get(module, numbers)
            moved = [name for name, value in numbers.items() if before.get(name) != value]
            if moved:
                self._changing[module] = sorted({*moved, *self._changing.get(module, ())})
            if numbers:
                self._seen[module] = numbers

    def now(self) -> list[tuple[Any, dict[str, Any]]]:
        """Returns the attributes of these objects, and the numbers that models have changed."""
        own = [
            (owner, {name: copied(value) for name, value in vars(owner).items()})
            for owner in self._objects
        ]
        if not self._changing:
            return own
        return own + [
            (module, {name: vars(module)[name] for name in names if name in vars(module)})
            for module, names in self._changing.items()
        ]


class _Items:
    """What a dict held."""

    __slots__ = ("_before", "_items")

    def __init__(self, items: dict[Any, Any]) -> None:
        self._items = items
        self._before = dict(dict.items(items))

    def __call__(self) -> None:
        items, before = self._items, self._before
        # An ordered dict keeps its order in a place of its own.
        base: Any = OrderedDict if isinstance(items, OrderedDict) else dict
        for key in [key for key in dict.keys(items) if key not in before]:
            base.__delitem__(items, key)
        for key, value in before.items():
            if not dict.__contains__(items, key) or dict.__getitem__(items, key) is not value:
                base.__setitem__(items, key, value)
        if base is OrderedDict and list(items) != list(before):
            for key in before:
                OrderedDict.move_to_end(items, key)  # type: ignore[arg-type]


class _Slot:
    """What an attribute was that lies in a slot."""

    __slots__ = ("_before", "_name", "_owner")

    def __init__(self, owner: Any, name: str, before: Any) -> None:
        self._owner, self._name, self._before = owner, name, before

    def __call__(self) -> None:
        if getattr(self._owner, self._name, None) is not self._before:
            with contextlib.suppress(AttributeError):
                setattr(self._owner, self._name, self._before)


class _Refusing:
    """Stands for an iterator that cannot be copied, and gives nothing away."""

    def __init__(self, stands_for: Any) -> None:
        self._stands_for = stands_for

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        kind = type(self._stands_for).__name__
        raise RefusedError(f"the step takes from a {kind}, which cannot be had a second time")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stands_for, name)


def spare(value: Any, *, given: bool) -> Any:
    """Returns what a replay is given instead of an iterator, or an open file, of the run.

    Other values are returned as they are.

    Args:
        value: The value.
        given: Whether the step took batches from a loader, which are handed out again, perhaps
            through this iterator.
    """
    if type(value) in (BuiltinFunctionType, MethodType):
        return spared_function(value)
    if type(value) in _PLAIN or isinstance(value, (torch.Tensor, torch.nn.Module)):
        return value
    if is_channel(value):
        return StandIn(value)
    if not hasattr(type(value), "__next__") or isinstance(value, _BaseDataLoaderIter):
        return value
    if type(value).__name__ in _COPIES:
        return copy.copy(value)
    if isinstance(_method(type(value), "__next__"), FunctionType) or isinstance(value, io.IOBase):
        return value  # its attributes, or its place in the file, are put back
    return value if given else _Refusing(value)


def spared_copy(value: Any, *, given: bool) -> Any:
    """Returns a copy of a container, with something else in the place of what is not to be used.

    Args:
        value: The container; anything else is returned as it is.
        given: As for ``spare``.
    """
    made = copied(value)
    if made is not value and len(made) <= _ITEMS:
        for key, inner in enumerate(value) if isinstance(value, list) else value.items():
            other = spare(inner, given=given)
            if other is not inner:
                made[key] = other
    return made


def _held_at(holder: Any, key: Any) -> Any:
    """Returns what a dictionary, a list or a cell of a function holds; None if it does not."""
    if isinstance(holder, dict):
        return dict.get(holder, key)
    if isinstance(holder, CellType):
        return holder.cell_contents
    return holder[key] if key < len(holder) else None


def _hold_at(holder: Any, key: Any, value: Any) -> None:
    if isinstance(holder, dict):
        dict.__setitem__(holder, key, value)
    elif isinstance(holder, CellType):
        holder.cell_contents = value
    else:
        holder[key] = value


def _method(kind: type, name: str) -> Any:
    return next((vars(cls)[name] for cls in kind.__mro__ if name in vars(cls)), None)


def is_used_up(value: Any) -> bool:
    """Returns whether taking from a value leaves less of it, and it cannot be copied."""
    return isinstance(spare(value, given=False), _Refusing)


def _slots(cls: type) -> Iterable[str]:
    names = cls.__dict__.get("__slots__", ())
    return (names,) if isinstance(names, str) else [n for n in names if n != "__dict__"]


def _is_foreign(kind: type) -> bool:
    module = kind.__module__ or ""
    return any(module == name or module.startswith(f"{name}.") for name in _FOREIGN)


def _has_own_means(owner: Any, attribute: str) -> bool:
    return isinstance(owner, torch.optim.Optimizer) and attribute == "state"
