"""Tensors as they lie in a file, and the plain values in which a pickle describes them.

Nothing that a pickle says is looked up, called or hashed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from nanguard.check.checkpoint.byte_ranges import DamagedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from nanguard.check.checkpoint.byte_ranges import Blob


@dataclass(frozen=True, slots=True)
class Dtype:
    """A type of number.

    Attributes:
        name: As torch calls it.
        bits: Of one element.
        floats: How one element is read: as floats of this many bits each; 0 for whole numbers.
        exponent: How many bits the exponent has.
        special: Which bit patterns are no finite number: ``ieee`` for those with all exponent bits
            set, ``fn`` for all bits but the sign, ``fnuz`` for minus zero, ``all`` for all bits.
    """

    name: str
    bits: int
    floats: int = 0
    exponent: int = 0
    special: str = "ieee"

    @property
    def parts(self) -> int:
        """How many floats an element has: 2 for complex numbers."""
        return self.bits // self.floats if self.floats else 1

    @property
    def mantissa(self) -> int:
        """How many bits the mantissa has."""
        return self.floats - self.exponent - (0 if self.special == "all" else 1)

    @property
    def wide(self) -> bool:
        """Whether finite values can be too large for fp16."""
        return self.floats >= 16 and self.exponent > 5

    def nbytes(self, count: int) -> int:
        """Returns how many bytes a number of elements takes."""
        return -(-count * self.bits // 8)


_FLOATS = (
    Dtype("float64", 64, 64, 11),
    Dtype("float32", 32, 32, 8),
    Dtype("float16", 16, 16, 5),
    Dtype("bfloat16", 16, 16, 8),
    Dtype("float8_e5m2", 8, 8, 5),
    Dtype("float8_e4m3fn", 8, 8, 4, "fn"),
    Dtype("float8_e5m2fnuz", 8, 8, 5, "fnuz"),
    Dtype("float8_e4m3fnuz", 8, 8, 4, "fnuz"),
    Dtype("float8_e8m0fnu", 8, 8, 8, "all"),
    Dtype("complex32", 32, 16, 5),
    Dtype("complex64", 64, 32, 8),
    Dtype("complex128", 128, 64, 11),
)
_WHOLE_NUMBER_BITS = {
    "uint8": 8,
    "int8": 8,
    "int16": 16,
    "uint16": 16,
    "int32": 32,
    "uint32": 32,
    "int64": 64,
    "uint64": 64,
    "bool": 8,
    "qint8": 8,
    "quint8": 8,
    "qint32": 32,
    "quint4x2": 8,
    "quint2x4": 8,
    "bits8": 8,
    "bits16": 16,
    "bits1x8": 8,
    "bits2x4": 8,
    "bits4x2": 8,
    "float4_e2m1fn_x2": 8,
}
DTYPES = {dtype.name: dtype for dtype in _FLOATS} | {
    name: Dtype(name, bits) for name, bits in _WHOLE_NUMBER_BITS.items()
}

# The classes of storages in pickles, without "Storage".
STORAGES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "QInt8": "qint8",
    "QUInt8": "quint8",
    "QInt32": "qint32",
    "QUInt4x2": "quint4x2",
    "QUInt2x4": "quint2x4",
    "Untyped": "uint8",
}

# What a safetensors header calls them.
SAFETENSORS = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}

# What numpy calls them, without the byte order.
NUMPY = {
    "f8": "float64",
    "f4": "float32",
    "f2": "float16",
    "c8": "complex64",
    "c16": "complex128",
    "i8": "int64",
    "i4": "int32",
    "i2": "int16",
    "i1": "int8",
    "u8": "uint64",
    "u4": "uint32",
    "u2": "uint16",
    "u1": "uint8",
    "b1": "bool",
}


@cache
def byte_values(dtype: Dtype) -> NDArray[Any]:
    """Returns the value of each of the 256 patterns of an 8-bit float."""
    import numpy as np

    bits = np.arange(256)
    if dtype.special == "all":
        powers: NDArray[Any] = np.ldexp(np.ones(256), bits - 127)
        powers[255] = np.nan
        return powers.astype(np.float32)
    mantissa, m = dtype.mantissa, bits & ((1 << dtype.mantissa) - 1)
    e = (bits >> mantissa) & ((1 << dtype.exponent) - 1)
    bias = (1 << (dtype.exponent - 1)) - (0 if dtype.special == "fnuz" else 1)
    tiny = np.ldexp(m.astype(float), 1 - bias - mantissa)
    values = np.where(e == 0, tiny, np.ldexp(1 + m / (1 << mantissa), e - bias))
    values = np.asarray(np.where(bits >= 128, -values, values))
    if dtype.special == "fnuz":
        values[128] = np.nan
    elif dtype.special == "fn":
        values[[127, 255]] = np.nan
    else:
        full = e == (1 << dtype.exponent) - 1
        values[full & (m != 0)] = np.nan
        values[full & (m == 0)] *= np.inf
    result: NDArray[Any] = values.astype(np.float32)
    return result


MAX_DIMENSIONS = 64

# Views with gaps are read in slabs of this many bytes.
SLAB = 1 << 25


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes that one tensor or several look at.

    Attributes:
        blob: Where they are.
        offset: Where they begin there.
        nbytes: How many there are.
        swapped: Whether numbers are stored with their largest byte first.
    """

    blob: Blob
    offset: int
    nbytes: int
    swapped: bool = False


@dataclass(frozen=True, slots=True)
class StorageRegion:
    """Elements of a storage: all between two places, or those at regular distances.

    Attributes:
        start: The first element.
        extent: How many elements there are from the first to the last.
        shape: How many in each direction; none if all are meant.
        strides: How far apart in each direction.
    """

    start: int
    extent: int
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """How many elements are meant."""
        return math.prod(self.shape) if self.shape else self.extent


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint.

    Attributes:
        keys: Where it is in the tree of the file, from the root on.
        dtype: The type of its numbers.
        shape: Its shape.
        storage: Where its numbers are.
        region: Which of them.
        scale: What quantised numbers are multiplied by; None for others.
        attribute: Whether it belongs to an object that is no module, such as a normaliser.
    """

    keys: tuple[str, ...]
    dtype: Dtype
    shape: tuple[int, ...]
    storage: Storage
    region: StorageRegion
    scale: float | None = None
    attribute: bool = False

    @property
    def name(self) -> str:
        """The keys as one name."""
        return ".".join(self.keys)


def region_of(
    start: int, shape: tuple[int, ...], strides: tuple[int, ...] | None, room: int
) -> StorageRegion:
    """Returns the elements a view looks at.

    Args:
        start: Its first element.
        shape: Its shape.
        strides: Its strides; None for a view without gaps.
        room: How many elements the storage has.

    Raises:
        DamagedError: It looks at elements that the storage does not have.
    """
    if len(shape) > MAX_DIMENSIONS or min(shape, default=0) < 0 or start < 0:
        raise DamagedError(f"a tensor has the shape {list(shape[:8])} at {start}")
    if strides is not None and len(strides) != len(shape):
        raise DamagedError(f"a tensor has the shape {list(shape[:8])} and {len(strides)} strides")
    if 0 in shape:
        return StorageRegion(start, 0)
    if strides is None:
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    if min(strides, default=0) < 0:
        raise DamagedError(f"a tensor has the strides {list(strides[:8])}")
    dims = sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1 and s > 0)
    extent = 1 + sum(s * (n - 1) for s, n in dims)
    if start + extent > room:
        raise DamagedError(
            f"a tensor of shape {list(shape[:8])} ends at element {start + extent:,} of a storage"
            f" that has {room:,}"
        )
    if math.prod(shape) >= 1 << 63:
        raise DamagedError(f"a tensor has the shape {list(shape[:8])}, which no number counts")
    count = math.prod(n for _, n in dims)
    if count >= extent:  # no gaps; or windows that overlap, which together have none
        return StorageRegion(start, extent)
    dims.reverse()
    return StorageRegion(start, extent, tuple(n for _, n in dims), tuple(s for s, _ in dims))


def slabs(region: StorageRegion, size: int) -> Iterator[StorageRegion]:
    """Yields a region with gaps as regions of few bytes each, in order.

    Args:
        region: The region.
        size: How many bytes an element has.
    """
    todo = [region]
    while todo:
        one = todo.pop()
        if one.extent * size <= SLAB or not one.shape:
            yield one
            continue
        stride, inner = one.strides[0], one.extent - one.strides[0] * (one.shape[0] - 1)
        step = max(1, (SLAB // size - inner) // stride + 1)
        parts = []
        for first in range(0, one.shape[0], step):
            many = min(step, one.shape[0] - first)
            start, extent = one.start + first * stride, inner + stride * (many - 1)
            if many > 1:
                shape, strides = (many, *one.shape[1:]), one.strides
            else:
                shape, strides = one.shape[1:], one.strides[1:]
            parts.append(StorageRegion(start, extent, shape, strides))
        todo.extend(reversed(parts))


# What a pickle holds, and the names that torch follows in one.


@dataclass(frozen=True, slots=True, eq=False)
class Global:
    """The name of a class or function that loading the pickle would look up."""

    module: str
    name: str

    @property
    def full(self) -> str:
        """The name with its module."""
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class PickleDict:
    """A dictionary as its pairs; keys are never hashed, since a file chooses them."""

    pairs: list[tuple[object, object]] = field(default_factory=list)

    def get(self, key: str) -> object:
        """Returns the last value of a key; None where there is none."""
        for name, value in reversed(self.pairs):
            if name == key:
                return value
        return None


@dataclass(slots=True, eq=False)
class Call:
    """What loading would make by calling something.

    Attributes:
        function: What would be called.
        args: With what.
        state: What the result would be given afterwards.
        items: What would be appended to it, if anything.
        pairs: What would be set in it, if anything.
    """

    function: object
    args: object
    state: object = None
    items: list[object] | None = None
    pairs: list[tuple[object, object]] | None = None

    @property
    def full(self) -> str:
        """The full name of what would be called; empty where that is not a name."""
        return self.function.full if isinstance(self.function, Global) else ""


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """Something outside the pickle that it refers to: the storage of a tensor."""

    key: object


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Bytes or text too long to keep: where they are in the file.

    Attributes:
        offset: Where they begin.
        size: How many bytes.
    """

    offset: int
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class LongLine:
    """A line of text too long to keep; what it stands for is escaped, and is not worked out.

    Attributes:
        size: How many bytes it has.
    """

    size: int


_TENSORS = ["BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short"]
REBUILD = [
    "parameter",
    "parameter_with_state",
    "qtensor",
    "tensor",
    "tensor_v2",
    "tensor_v3",
    "sparse_tensor",
    "meta_tensor_no_storage",
    "nested_tensor",
    "wrapper_subclass",
    "device_tensor_from_numpy",
    "device_tensor_from_cpu_tensor",
]
PARAMETER = "torch.nn.parameter.Parameter"
ENCODE = "_codecs.encode"
_SINGLE = [
    "collections.OrderedDict",
    "collections.Counter",
    PARAMETER,
    "torch.Size",
    "torch.serialization._get_layout",
    "torch.Tensor",
    "torch.device",
    ENCODE,
    "builtins.bytearray",
    "builtins.set",
    "builtins.complex",
    "torch.storage.TypedStorage",
    "torch.storage.UntypedStorage",
    "torch._tensor._rebuild_from_type_v2",
]
_SCHEMES = [
    "per_tensor_affine",
    "per_tensor_symmetric",
    "per_channel_affine",
    "per_channel_symmetric",
    "per_channel_affine_float_qparams",
]
_PLACES = ("torch", "torch.cuda")
# Torch knows these once ``torch.distributed.tensor`` is imported.
DISTRIBUTED = frozenset(
    (
        "torch.distributed.device_mesh.DeviceMesh",
        "torch.distributed._tensor.api.DTensor",
        "torch.distributed.tensor.DTensor",
        "torch.distributed.tensor._api.DTensor",
        "torch.distributed.tensor._dtensor_spec.DTensorSpec",
        "torch.distributed.tensor._dtensor_spec.TensorMeta",
        "torch.distributed.tensor.placement_types.Partial",
        "torch.distributed.tensor.placement_types.Replicate",
        "torch.distributed.tensor.placement_types.Shard",
    )
)
QUANTISED = frozenset(name for name in STORAGES if name.startswith("Q"))
DTYPE_NAMES = frozenset(
    [
        *(f"torch.{name}" for name in DTYPES),
        *(f"torch.{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
    ]
)
ALLOWED = DTYPE_NAMES | DISTRIBUTED | {
    *_SINGLE,
    *(f"torch.{scheme}" for scheme in _SCHEMES),
    *(f"torch._utils._rebuild_{name}" for name in REBUILD),
    *(f"torch.{name}Storage" for name in STORAGES if name != "Untyped"),
    *(f"torch.cuda.{name}Storage" for name in STORAGES.keys() - QUANTISED if name != "Untyped"),
    *(f"{p}{s}.{name}Tensor" for p in _PLACES for s in ("", ".sparse") for name in _TENSORS
      if name != "Bool" or not s),
}  # fmt: skip


def storage_type(made: object) -> Dtype | None:
    """Returns the type of the numbers in a storage from the name of its class."""
    if not isinstance(made, Global) or not made.name.endswith("Storage"):
        return None
    return DTYPES.get(STORAGES.get(made.name.removesuffix("Storage"), ""))
