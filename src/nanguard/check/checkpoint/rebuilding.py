"""How a pickle describes a tensor: the functions torch and numpy would call to make one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from nanguard.check.checkpoint.dtypes import DTYPES, NUMPY, STORAGES, Dtype
from nanguard.check.checkpoint.inert import Call, DamagedError, Global, Persistent, Span
from nanguard.check.checkpoint.stored import Region, Storage, StoredTensor, region_of

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
    region: Region
    scale: float | None = None
    inside: tuple[object, ...] = ()

    def tensor(self, keys: tuple[str, ...]) -> StoredTensor:
        """Returns the tensor with its place."""
        if self.storage is None:
            raise ValueError("there are no numbers")
        return StoredTensor(keys, self.dtype, self.shape, self.storage, self.region, self.scale)


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
    return None


def storage_type(made: object) -> Dtype | None:
    """Returns the type of the numbers in a storage from the name of its class."""
    if not isinstance(made, Global) or not made.name.endswith("Storage"):
        return None
    return DTYPES.get(STORAGES.get(made.name.removesuffix("Storage"), ""))


def _tensor(call: Call, name: str, sources: Sources) -> Rebuilt | None:
    args = call.args
    if not isinstance(args, tuple) or len(args) < 4:
        raise DamagedError("a tensor has no shape")
    if len(args) not in _TENSORS[name]:
        raise DamagedError(f"a tensor is made of {len(args)} parts, which torch does not know")
    start, shape, strides = args[1], _whole_numbers(args[2]), _whole_numbers(args[3])
    if not isinstance(start, int) or shape is None or strides is None:
        raise DamagedError("a tensor has no shape")
    given = _named_type(args[6]) if name == "_rebuild_tensor_v3" and len(args) > 6 else None
    held = _held(args[0], sources)
    if held is None:
        return Rebuilt(DTYPES["uint8"], shape, None, Region(0, 0))
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
                return sources.storage(key[2], dtype.nbytes(count)), dtype
        return None
    if isinstance(made, Call) and made.full == "torch.storage._load_from_bytes":
        args = made.args if isinstance(made.args, tuple) else ()
        if args and isinstance(args[0], (Span, bytes)):
            return sources.nested(args[0])
    return None


def _named_type(made: object) -> Dtype | None:
    return DTYPES.get(made.name) if isinstance(made, Global) and made.module == "torch" else None


def _whole_numbers(made: object) -> tuple[int, ...] | None:
    """Returns a shape, which may be wrapped in a class of torch."""
    if isinstance(made, Call) and isinstance(made.args, tuple) and made.args:
        made = made.args[0]
    if not isinstance(made, (tuple, list)):
        return None
    found = tuple(number for number in made if isinstance(number, int))
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
        return Rebuilt(dtype, shape, None, Region(0, 0))
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
