"""The tensors in what a pickle says: how each is described, and its place in the tree."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from nanguard.check.checkpoint.byte_ranges import DamagedError
from nanguard.check.checkpoint.tensors import (
    DTYPES,
    NUMPY,
    Call,
    Dtype,
    Global,
    Persistent,
    PickleDict,
    Span,
    Storage,
    StorageRegion,
    StoredTensor,
    region_of,
    storage_type,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# What torch calls to make a tensor, and with how many arguments.
_TENSORS = {
    "_rebuild_tensor": (4,),
    "_rebuild_tensor_v2": (6, 7),
    "_rebuild_tensor_v3": (7, 8),
    "_rebuild_qtensor": (7,),
}
_ARRAYS = frozenset(
    f"{package}.{name}"
    for package in ("numpy.core", "numpy._core")
    for name in ("multiarray._reconstruct", "numeric._frombuffer", "multiarray.scalar")
)


class Sources(Protocol):
    """Finds the bytes that a pickle refers to."""

    def storage(self, key: object, nbytes: int) -> Storage:
        """Returns the storage of a key.

        Args:
            key: As the pickle has it.
            nbytes: How many bytes it should have.

        Raises:
            DamagedError: There are fewer.
        """

    def span(self, data: Span | bytes) -> Storage:
        """Returns bytes of the pickle itself."""

    def nested(self, data: Span | bytes) -> tuple[Storage, Dtype] | None:
        """Returns the storage that bytes of the pickle hold as a file of their own."""


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A tensor without a name.

    Attributes:
        dtype: The type of its numbers.
        shape: Its shape.
        storage: Where they are; None if they cannot be read.
        region: Which of them.
        scale: What quantised numbers are multiplied by.
        inside: What else is in the description, such as the scales of channels.
    """

    dtype: Dtype
    shape: tuple[int, ...]
    storage: Storage | None
    region: StorageRegion
    scale: float | None = None
    inside: tuple[object, ...] = ()

    def tensor(self, keys: tuple[str, ...], *, attribute: bool = False) -> StoredTensor:
        """Returns the tensor with its place."""
        if self.storage is None:
            raise ValueError("there are no numbers")
        return StoredTensor(
            keys, self.dtype, self.shape, self.storage, self.region, self.scale, attribute
        )


def rebuild(call: Call, sources: Sources) -> Rebuilt | Call | None:
    """Returns the tensor a call describes.

    Args:
        call: The call.
        sources: Finds bytes.

    Returns:
        The tensor; or the call that this one only wraps; or None if it is about something else.

    Raises:
        DamagedError: The tensor is not all there.
    """
    module, _, name = call.full.rpartition(".")
    if module == "torch._utils" and name in _TENSORS:
        return _tensor(call, name, sources)
    if call.full == "torch._tensor._rebuild_from_type_v2":
        args = call.args
        if isinstance(args, tuple) and len(args) >= 3 and isinstance(args[0], Global):
            return Call(args[0], args[2])
    if call.full in _ARRAYS:
        return _array(call, sources)
    if call.full == "torch._utils._rebuild_nested_tensor":  # its shapes are numbers of tensors
        return Rebuilt(DTYPES["uint8"], (), None, StorageRegion(0, 0))
    return None


def _tensor(call: Call, name: str, sources: Sources) -> Rebuilt | None:
    args = call.args
    if not isinstance(args, tuple) or len(args) < 4:
        raise DamagedError("a tensor has no shape")
    if len(args) not in _TENSORS[name]:
        raise DamagedError(f"a tensor is made of {len(args)} parts, which torch does not know")
    start, shape, strides = args[1], _whole_numbers(args[2]), _whole_numbers(args[3])
    if type(start) is not int or shape is None or strides is None:
        raise DamagedError("a tensor has no shape")
    given = _named_type(args[6]) if name == "_rebuild_tensor_v3" and len(args) > 6 else None
    held = _held(args[0], sources)
    if held is None:
        return Rebuilt(DTYPES["uint8"], shape, None, StorageRegion(0, 0))
    storage, dtype = held
    dtype = given or dtype
    region = region_of(start, shape, strides, storage.nbytes * 8 // dtype.bits)
    if name != "_rebuild_qtensor" or len(args) < 5:
        return Rebuilt(dtype, shape, storage, region)
    about = args[4] if isinstance(args[4], tuple) else ()
    scale = about[1] if len(about) > 1 and isinstance(about[1], float) else None
    return Rebuilt(dtype, shape, storage, region, scale, about)


def _held(made: object, sources: Sources) -> tuple[Storage, Dtype] | None:
    """Returns where a tensor's numbers are, and their type."""
    if isinstance(made, Persistent):
        key = made.key
        if isinstance(key, tuple) and len(key) >= 5:
            dtype, count = storage_type(key[1]), key[4]
            if dtype is not None and isinstance(count, int) and count >= 0:
                whole = sources.storage(key[2], dtype.nbytes(count))
                return _part(whole, dtype, key[5] if len(key) > 5 else None), dtype
        return None
    if isinstance(made, Call) and made.full == "torch.storage._load_from_bytes":
        args = made.args if isinstance(made.args, tuple) else ()
        if args and isinstance(args[0], (Span, bytes)):
            return sources.nested(args[0])
    return None


def _part(whole: Storage, dtype: Dtype, view: object) -> Storage:
    """Returns the part of a storage that very old files speak of: its key, begin and length."""
    if not isinstance(view, tuple) or len(view) != 3:
        return whole
    _, begin, count = view
    if type(begin) is not int or type(count) is not int or min(begin, count) < 0:
        raise DamagedError("a part of a storage does not say where it is")
    if dtype.nbytes(begin + count) > whole.nbytes:
        raise DamagedError(f"a part of a storage ends at element {begin + count:,}, behind its end")
    offset = whole.offset + dtype.nbytes(begin)
    return Storage(whole.blob, offset, dtype.nbytes(count), whole.swapped)


def _named_type(made: object) -> Dtype | None:
    return DTYPES.get(made.name) if isinstance(made, Global) and made.module == "torch" else None


def _whole_numbers(made: object) -> tuple[int, ...] | None:
    """Returns a shape, which may be wrapped in a class of torch."""
    if isinstance(made, Call) and isinstance(made.args, tuple) and made.args:
        made = made.args[0]
    if not isinstance(made, (tuple, list)):
        return None
    found = tuple(number for number in made if type(number) is int)
    return found if len(found) == len(made) else None


def _array(call: Call, sources: Sources) -> Rebuilt | None:
    """Returns an array of numpy; only those whose bytes are in the file as they are."""
    made, shape, data = _array_parts(call)
    found = _numpy_type(made)
    if found is None or shape is None:
        return None
    dtype, swapped = found
    data = _bytes(data)
    if data is None:
        return Rebuilt(dtype, shape, None, StorageRegion(0, 0))
    inner = sources.span(data)
    storage = Storage(inner.blob, inner.offset, inner.nbytes, swapped)
    return Rebuilt(dtype, shape, storage, region_of(0, shape, None, inner.nbytes * 8 // dtype.bits))


def _array_parts(call: Call) -> tuple[object, tuple[int, ...] | None, object]:
    """Returns the type, the shape and the bytes of an array."""
    args = call.args if isinstance(call.args, tuple) else ()
    if call.full.endswith(".scalar") and len(args) > 1:
        return args[0], (), args[1]
    if call.full.endswith("._frombuffer") and len(args) > 2:
        return args[1], _whole_numbers(args[2]), args[0]
    if isinstance(call.state, tuple) and len(call.state) > 4:
        return call.state[2], _whole_numbers(call.state[1]), call.state[4]
    return None, None, None


def _bytes(data: object) -> Span | bytes | None:
    """Returns the bytes of an array; protocol 2 writes them as text that is encoded again."""
    if isinstance(data, (Span, bytes)):
        return data
    if isinstance(data, Call):
        args = data.args if isinstance(data.args, tuple) else ()
        if data.full == "_codecs.encode" and args and isinstance(args[0], str):
            try:
                return args[0].encode("latin-1")
            except UnicodeEncodeError:
                return None
        if data.full in ("builtins.bytes", "builtins.bytearray") and args:
            return _bytes(args[0])
        return b"" if data.full == "builtins.bytes" else None
    return None


def _numpy_type(made: object) -> tuple[Dtype, bool] | None:
    """Returns the type of an array and whether its bytes are swapped."""
    if not isinstance(made, Call) or made.full != "numpy.dtype":
        return None
    args = made.args if isinstance(made.args, tuple) else ()
    name = args[0] if args else None
    if isinstance(name, bytes):
        name = name.decode("ascii", "replace")
    dtype = DTYPES.get(NUMPY.get(str(name).lstrip("<>|="), ""))
    state = made.state if isinstance(made.state, tuple) and len(made.state) > 1 else (3, "<")
    return None if dtype is None else (dtype, state[1] in (">", b">"))


MAX_DEPTH = 100
MAX_KEY = 300
# Parts of a pickled module that are no part of a parameter's name.
_SILENT = frozenset({"_modules", "_parameters", "_buffers", "_local_tensor", "_local_tensors"})
_PAIRS = frozenset({"collections.OrderedDict", "builtins.dict", "collections.defaultdict"})


class TreePlace(NamedTuple):
    """A place in a tree.

    Attributes:
        parent: The place above it; None for the root.
        key: What it is called there; empty where the name says nothing.
        depth: How far it is from the root.
        optimizer: Whether it is in something built like the state of an optimizer.
        owner: The depth of the nearest object above it that is none of torch; None if there is
            none, or if a module keeps it among its parameters and buffers.
    """

    parent: TreePlace | None
    key: str
    depth: int
    optimizer: bool
    owner: int | None = None

    def below(self, key: object) -> TreePlace:
        """Returns the place of a child."""
        return TreePlace(self, _text(key), self.depth + 1, self.optimizer, self.owner)

    def holds_attribute(self, call: Call) -> bool:
        """Returns whether an array or a tensor there is a fact of an object and no weight.

        An array of numpy is, however deep in the object; a tensor only where it is an attribute
        itself, for a dictionary of tensors may be the state of a model.
        """
        if self.owner is None:
            return False
        return call.full in _ARRAYS or self.depth == self.owner + 1

    def keys(self) -> tuple[str, ...]:
        """Returns the keys from the root on."""
        found: list[str] = []
        at: TreePlace | None = self
        while at is not None:
            if at.key:
                found.append(at.key)
            at = at.parent
        return tuple(reversed(found))


@dataclass(slots=True)
class TensorTree:
    """What was found in a tree.

    Attributes:
        tensors: The tensors, in the order of the file, and whether each is in an optimizer's state.
        scalars: Plain numbers that are not finite.
        counters: Whole numbers at the root, such as the step.
        unread: How many tensors could not be followed.
        damage: What is wrong with tensors.
    """

    tensors: list[tuple[StoredTensor, bool]] = field(default_factory=list)
    scalars: list[tuple[tuple[str, ...], float, bool]] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    unread: int = 0
    damage: list[str] = field(default_factory=list)


def walk(value: object, sources: Sources, calls: Iterable[Call] = ()) -> TensorTree:
    """Returns the tensors in a value.

    Shared parts are visited once, so that a small file cannot stand for an endless tree.

    Args:
        value: What a pickle holds.
        sources: Finds the bytes of a storage.
        calls: All that is made on the way, of which some may not be in the value.
    """
    walked = _Walk(sources)
    tree = walked.run(value)
    walked.judge(calls)
    return tree


class _Walk:
    """The state of one walk."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.tree = TensorTree()
        self.seen: set[int] = set()
        self.todo: list[tuple[object, TreePlace]] = []

    def run(self, value: object) -> TensorTree:
        """Visits everything, in the order of the file."""
        self.todo.append((value, TreePlace(None, "", 0, optimizer=False)))
        while self.todo:
            self.visit(*self.todo.pop())
        return self.tree

    def judge(self, calls: Iterable[Call]) -> None:
        """Notes what is wrong with tensors that are made and put nowhere, or into a key."""
        for call in calls:
            made: object = None if id(call) in self.seen else call
            try:
                while isinstance(made, Call):
                    made = rebuild(made, self.sources)
            except DamagedError as error:
                self.tree.damage.append(f"a tensor without a name: {error}")

    def visit(self, value: object, place: TreePlace) -> None:
        """Notes a value and puts its children in line."""
        if isinstance(value, (bool, str, bytes, Global, Span, Persistent)) or value is None:
            return
        if isinstance(value, (int, float)):
            self.number(value, place)
            return
        if id(value) in self.seen:
            return
        self.seen.add(id(value))
        if place.depth >= MAX_DEPTH:
            self.tree.unread += 1
            return
        self.todo.extend(reversed(list(self.children(value, place))))

    def number(self, value: float, place: TreePlace) -> None:
        """Notes a plain number."""
        if isinstance(value, int):
            if place.depth == 1 and abs(value) < 1 << 63:
                self.tree.counters[place.key] = value
        elif not math.isfinite(value):
            self.tree.scalars.append((place.keys(), value, place.optimizer))

    def children(self, value: object, place: TreePlace) -> Iterator[tuple[object, TreePlace]]:
        """Yields what is in a value, with its place."""
        if isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                yield item, place.below(index)
        elif isinstance(value, PickleDict):
            yield from self.pairs(value.pairs, place)
        elif isinstance(value, Call):
            yield from self.call(value, place)

    def call(self, call: Call, place: TreePlace) -> Iterator[tuple[object, TreePlace]]:
        """Yields what is in something that would be made by a call."""
        try:
            rebuilt = rebuild(call, self.sources)
        except DamagedError as error:
            self.tree.damage.append(f"{'.'.join(place.keys())}: {error}")
            return
        if rebuilt is None:
            yield from self.parts(call, place)
        elif isinstance(rebuilt, Rebuilt):
            if rebuilt.storage is None:
                self.tree.unread += 1
            else:
                attribute = place.holds_attribute(call)
                tensor = rebuilt.tensor(place.keys(), attribute=attribute)
                self.tree.tensors.append((tensor, place.optimizer))
            yield from ((item, place) for item in rebuilt.inside)
        else:
            yield rebuilt, place

    def parts(self, call: Call, place: TreePlace) -> Iterator[tuple[object, TreePlace]]:
        """Yields the arguments, the state and the items of a call."""
        if call.full.startswith("torch."):
            place = place._replace(owner=None)  # a parameter, a part of a sharded tensor
        args = call.args if isinstance(call.args, tuple) else (call.args,)
        if call.full in _PAIRS and len(args) == 1 and isinstance(args[0], list):
            yield from self.pairs([tuple(i) for i in args[0] if _pair(i)], place)
        else:
            yield from ((item, place) for item in args)
        yield from self.pairs(call.pairs or [], place)
        yield from ((item, place.below(index)) for index, item in enumerate(call.items or []))
        if call.full not in _PAIRS:  # the state of a dictionary is about it, not in it
            torchs = call.full.startswith("torch.")
            yield call.state, place if torchs else place._replace(owner=place.depth)

    def pairs(
        self, pairs: list[tuple[object, object]], place: TreePlace
    ) -> Iterator[tuple[object, TreePlace]]:
        """Yields the values of a dictionary."""
        names = {key for key, _ in pairs if isinstance(key, str)}
        if {"state", "param_groups"} <= names:
            place = place._replace(optimizer=True)
        for key, value in pairs:
            if key in _SILENT if isinstance(key, str) else False:
                yield value, place.below("")._replace(owner=None)
            else:
                yield value, place.below(key)


def _pair(item: object) -> bool:
    return isinstance(item, (list, tuple)) and len(item) == 2


def _text(key: object) -> str:
    if isinstance(key, bytes):
        key = key.decode("utf-8", "replace")
    if isinstance(key, (str, int, float)):
        return str(key)[:MAX_KEY] if isinstance(key, str) else f"{key:.20g}"
    return key.name if isinstance(key, Global) else "?"
