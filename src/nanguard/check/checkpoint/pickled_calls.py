"""What torch can make of a pickle with ``weights_only=True``, without making it.

Torch follows few names, and each of them takes few things. What they take is listed here; whatever
is not listed is refused, as torch would. About names that torch does not follow nothing is said:
what they give may be anything.
"""

from __future__ import annotations

import codecs
import math
import re
from typing import TYPE_CHECKING

from nanguard.check.checkpoint.byte_ranges import TooLargeError
from nanguard.check.checkpoint.tensors import (
    ALLOWED,
    DISTRIBUTED,
    DTYPE_NAMES,
    DTYPES,
    ENCODE,
    PARAMETER,
    QUANTISED,
    REBUILD,
    STORAGES,
    Call,
    Global,
    LongLine,
    Persistent,
    PickleDict,
    Span,
)

if TYPE_CHECKING:
    from collections.abc import Callable

# What calling a function gives; what is not listed may be anything.
_GIVES = {
    **dict.fromkeys((f"torch._utils._rebuild_{name}" for name in REBUILD), "tensor"),
    "torch._tensor._rebuild_from_type_v2": "tensor",
    PARAMETER: "tensor",
    "collections.OrderedDict": "dict",
    "collections.Counter": "dict",
    "builtins.set": "set",
    "builtins.frozenset": "frozenset",
    "builtins.list": "list",
    "builtins.bytearray": "bytearray",
    "builtins.complex": "complex",
    "torch.Size": "tuple",
    "torch.device": "device",
    "torch.serialization._get_layout": "layout",
    ENCODE: "bytes",
}
# Other classes of Python whose objects can change, and are no keys.
_CHANGING = frozenset(("collections.defaultdict", "collections.deque", "builtins.dict"))
_UNHASHABLE = frozenset(("list", "dict", "set", "bytearray"))
# What is a key whatever it says.
_SIMPLE = frozenset((str, int, float, bool, type(None), bytes, Persistent, Span, Global))
_DEEPEST_WRAPPED = 8  # parameters in parameters, which nobody writes
_DEEPEST_KEY = 1_000  # tuples in tuples; Python itself ends at some depth
# Elements of what functions are given; so many letters of a text count as one of them.
_MOST_LOOKED_AT, _LETTERS = 1 << 22, 32
_INT64 = range(-(1 << 63), 1 << 63)


def kind(value: object) -> str:
    """Returns what something in a pickle would be; ``any`` where nothing is known about it."""
    if isinstance(value, Call):
        return _GIVES.get(value.full, "any")
    if isinstance(value, Global):
        if value.full in DTYPE_NAMES:
            return "dtype"
        return "class" if value.full in ALLOWED - DISTRIBUTED else "any"
    if isinstance(value, (str, bytes, Span)):  # torch takes the bytes of Python 2 for text
        return "text"
    for made, name in _KINDS:
        if isinstance(value, made):
            return name
    return "any"


_KINDS: tuple[tuple[type, str], ...] = (
    (bool, "bool"),
    (int, "int"),
    (float, "float"),
    (list, "list"),
    (tuple, "tuple"),
    (PickleDict, "dict"),
    (Persistent, "storage"),
    (type(None), "none"),
    (LongLine, "any"),
)


def _is(value: object, *kinds: str) -> bool:
    return kind(value) in (*kinds, "any")


class Makeable:
    """Says what of a pickle can be made, at the moment at which it would be."""

    def __init__(self) -> None:
        # How deep tuples are that have tuples in them, or that are no keys; they are kept, so that
        # no other tuple gets the number of one.
        self._nested: dict[int, tuple[object, float]] = {}
        self._looked_at = 0

    def note_tuple(self, items: tuple[object, ...]) -> None:
        """Notes a tuple, whose parts were noted before."""
        depth = max(map(self._depth, items), default=0.0)
        if depth:
            self._nested[id(items)] = (items, depth + 1)

    def _depth(self, value: object) -> float:
        if type(value) in _SIMPLE:
            return 0.0
        if isinstance(value, tuple):
            return self._nested.get(id(value), (value, 1.0))[1]
        return 0.0 if self.as_key(value) else math.inf

    def as_key(self, value: object) -> bool:
        """Returns whether a dictionary takes something as a key: nothing that can change."""
        if isinstance(value, tuple):
            return self._depth(value) <= _DEEPEST_KEY
        if isinstance(value, Call) and value.full in _CHANGING:
            return False
        return kind(value) not in _UNHASHABLE

    def by_call(self, function: object, args: object, *, bare: bool = False) -> bool:
        """Returns whether something can be made by calling a function.

        Args:
            function: What is called.
            args: With what.
            bare: Whether a class is only to make an object, and not to fill it.
        """
        if isinstance(function, Call):
            return function.full not in _GIVES
        if not isinstance(function, Global) or not isinstance(args, (tuple, Call)):
            return False
        name = function.full
        if name not in _TAKES:
            return name not in ALLOWED or name in DISTRIBUTED
        if not isinstance(args, tuple):
            return kind(args) == "any"
        least, most, takes = _TAKES[name]
        if bare and name != PARAMETER:
            return name in _CLASSES and not args
        if not least <= len(args) <= most:
            return False
        self._look_at(args)
        return takes(self, *args)

    def with_items(self, target: object) -> bool:
        """Returns whether items can be appended to something."""
        return _is(target, "list")

    def with_elements(self, target: object, items: list[object]) -> bool:
        """Returns whether elements can be added to something that may be a set."""
        return _is(target, "set") and all(map(self.as_key, items))

    def with_pairs(self, target: object) -> bool:
        """Returns whether pairs can be set in something."""
        return _is(target, "dict")

    def with_state(self, target: object, state: object) -> bool:
        """Returns whether something can be given a state after it was made."""
        if isinstance(target, Global):
            return kind(target) == "any"
        if not isinstance(target, Call):
            return False
        if target.full == "collections.OrderedDict":
            return _is(state, "dict") or state in ((), [])
        return kind(target) == "any"

    def every_key(self, items: object) -> bool:
        """Returns whether a set can be made of something."""
        if isinstance(items, (list, tuple)):
            return all(map(self.as_key, items))
        return _is(items, "text", "dict", "set", "frozenset", "bytearray", "tuple", "bytes")

    def _look_at(self, args: tuple[object, ...]) -> None:
        for one in args:
            if isinstance(one, (list, tuple)):
                self._looked_at += len(one)
            elif isinstance(one, (str, bytes)):
                self._looked_at += len(one) // _LETTERS
        if self._looked_at > _MOST_LOOKED_AT:
            raise TooLargeError("the pickle makes too much of the same parts")


def _sizes(value: object) -> bool:
    """Returns whether something is a shape, or steps through a storage."""
    if isinstance(value, Call):
        return value.full == "torch.Size" or kind(value) == "any"
    return isinstance(value, (list, tuple)) and all(
        _is(one, "int", "tensor") and (not isinstance(one, int) or one in _INT64) for one in value
    )


def _place(value: object) -> bool:
    """Returns whether something is the first element of a tensor."""
    return _is(value, "int") and (not isinstance(value, int) or 0 <= value < 1 << 63)


def _storage_of(storage: object) -> str:
    """Returns the class of a storage, without "Storage"; empty for what is none."""
    key = storage.key if isinstance(storage, Persistent) else None
    made = key[1] if isinstance(key, tuple) and len(key) > 1 else None
    return made.name.removesuffix("Storage") if isinstance(made, Global) else ""


# How the names of types begin that can have a gradient.
_FLOATING = ("float", "bfloat", "complex")


def _tensor(_: Makeable, storage: object, start: object, shape: object, steps: object) -> bool:
    whole = _is(storage, "storage") and _storage_of(storage) not in QUANTISED
    return whole and _place(start) and _sizes(shape) and _sizes(steps)


def _tensor_v2(
    m: Makeable, storage: object, start: object, shape: object, steps: object, gradient: object,
    _hooks: object, bits: object = None,
) -> bool:  # fmt: skip
    name = _storage_of(storage)
    dtype = STORAGES.get(name, "" if name else "complex")  # nothing is known of it: anything goes
    if gradient is True and not dtype.startswith(_FLOATING):
        return False
    return _tensor(m, storage, start, shape, steps) and _is(gradient, "bool") and _bits(bits, dtype)


def _tensor_v3(
    _: Makeable, storage: object, start: object, shape: object, steps: object, gradient: object,
    _hooks: object, dtype: object, bits: object = None,
) -> bool:  # fmt: skip
    where = _is(storage, "storage") and _place(start) and _sizes(shape) and _sizes(steps)
    name = dtype.name if isinstance(dtype, Global) else ""
    if gradient is True and not name.startswith(_FLOATING):
        return False
    return where and _is(gradient, "bool") and _is(dtype, "dtype") and _bits(bits, name)


def _bits(made: object, dtype: str) -> bool:
    """Returns whether a tensor of a type can be conjugated or negated as its description says."""
    if made is None or kind(made) == "any" or made in ((), [], "", b"", 0):
        return True
    pairs = made.pairs or [] if isinstance(made, (PickleDict, Call)) else None
    if pairs is None or not _is(made, "dict") or (isinstance(made, Call) and made.args != ()):
        return False
    for name, value in pairs:
        if kind(name) != "text" or kind(value) != "bool":
            return False
        if value and name in ("conj", b"conj") and not dtype.startswith("complex"):
            return False
        if value and name in ("neg", b"neg") and not dtype.startswith(_FLOATING):
            return False
    return True


def _quantised(
    _: Makeable, storage: object, start: object, shape: object, steps: object, about: object,
    gradient: object, _hooks: object,
) -> bool:  # fmt: skip
    name = _storage_of(storage)
    if not (_is(storage, "storage") and (name in QUANTISED or not name) and _place(start)):
        return False
    if not (_sizes(shape) and _sizes(steps) and _is(gradient, "bool")) or gradient is True:
        return False
    if not _fits(storage, shape):
        return False
    if not isinstance(about, (list, tuple)) or not about or not isinstance(about[0], Global):
        return kind(about) == "any"
    scheme = about[0].full
    if scheme == "torch.per_tensor_affine":
        return len(about) == 3 and _is(about[1], "float", "int", "bool") and _sizes([about[2]])
    if scheme not in ("torch.per_channel_affine", "torch.per_channel_affine_float_qparams"):
        return kind(about[0]) == "any"
    if len(about) != 4 or not isinstance(about[3], int) or not isinstance(shape, (list, tuple)):
        return False
    return 0 <= about[3] < len(shape) and all(_channels(o, shape[about[3]]) for o in about[1:3])


def _fits(storage: object, shape: object) -> bool:
    """Returns whether a storage has as many elements as a shape, so that memory is there for it."""
    key, counts = storage.key if isinstance(storage, Persistent) else (), _unwrapped(shape)
    count = key[4] if isinstance(key, tuple) and len(key) > 4 else None
    if type(count) is not int or not isinstance(counts, (list, tuple)):
        return True
    return math.prod(one for one in counts if type(one) is int) <= 4 * count


def _channels(made: object, count: object) -> bool:
    """Returns whether something has a number for each channel."""
    if isinstance(made, list):
        return len(made) == count and all(_is(one, "float", "int", "bool") for one in made)
    shape = _shape_of(made)
    return _is(made, "tensor") and (shape is None or shape == (count,))


def _shape_of(made: object) -> tuple[int, ...] | None:
    """Returns the shape of a tensor that is made in the usual way; None for others."""
    usual = tuple(f"torch._utils._rebuild_{name}" for name in ("tensor", "tensor_v2", "tensor_v3"))
    args = made.args if isinstance(made, Call) and made.full in usual else ()
    shape = _unwrapped(args[2]) if isinstance(args, tuple) and len(args) > 2 else None
    if not isinstance(shape, (list, tuple)):
        return None
    return tuple(one if isinstance(one, int) else -1 for one in shape)


def _sparse(_: Makeable, layout: object, data: object) -> bool:
    if not isinstance(data, (list, tuple)) or not _is(layout, "layout"):
        return False
    words = layout.args if isinstance(layout, Call) and kind(layout) == "layout" else None
    if words == ("torch.sparse_coo",):
        whole = len(data) == 3 or (len(data) == 4 and _is(data[3], "none", "bool"))
        return whole and _coordinates(*data[:3])
    if words is not None and words[0] not in _COMPRESSED:  # type: ignore[index]
        return False
    return len(data) == 4 and all(_is(one, "tensor") for one in data[:3]) and _extents(data[3])


_COMPRESSED = ("torch.sparse_csr", "torch.sparse_csc", "torch.sparse_bsr", "torch.sparse_bsc")
_LAYOUTS = (*_COMPRESSED, "torch.strided", "torch.sparse_coo", "torch._mkldnn", "torch.jagged")


def _unwrapped(made: object) -> object:
    """Returns what is in a ``torch.Size``, or what there is."""
    for _ in range(_DEEPEST_WRAPPED):
        if not isinstance(made, Call) or made.full != "torch.Size":
            break
        made = made.args[0] if isinstance(made.args, tuple) and made.args else ()
    return made


def _extents(made: object) -> bool:
    """Returns whether something is the shape of a tensor without a storage."""
    made = _unwrapped(made)
    if not isinstance(made, (list, tuple)):
        return kind(made) == "any"
    counts = [one for one in made if type(one) is int]
    return len(counts) == len(made) and min(counts, default=0) >= 0 and math.prod(counts) < 1 << 63


def _coordinates(places: object, values: object, size: object) -> bool:
    """Returns whether places, their values and the shape of all fit together."""
    if not (_is(places, "tensor") and _is(values, "tensor") and _extents(size)):
        return False
    size, where, what = _unwrapped(size), _shape_of(places), _shape_of(values)
    if where is None or what is None or not isinstance(size, (list, tuple)):
        return True
    if len(where) != 2 or not what or where[1] != what[0]:
        return False
    return len(size) == where[0] + len(what) - 1 and tuple(size[where[0] :]) == what[1:]


def _without_storage(
    _: Makeable, dtype: object, shape: object, steps: object, gradient: object
) -> bool:
    name = dtype.name if isinstance(dtype, Global) else "float"
    whole = _is(dtype, "dtype") and not name.startswith("q") and _is(gradient, "bool")
    if gradient is True and not name.startswith(_FLOATING):
        return False
    if isinstance(shape, (list, tuple)) and isinstance(steps, (list, tuple)):
        whole = whole and len(shape) == len(steps)
    return whole and _extents(shape) and _sizes(steps)


def _nested(_: Makeable, numbers: object, *about: object) -> bool:
    return _is(numbers, "tensor") and all(_is(one, "tensor") for one in about)


def _wrapper(_: Makeable, cls: object, *_about: object) -> bool:
    return kind(cls) == "any"  # none of those that torch follows can be one


def _from_array(_: Makeable, data: object, dtype: object, device: object, gradient: object) -> bool:
    return kind(data) == "any" and _is(dtype, "dtype") and _is(device, "text", "device") and (
        _is(gradient, "bool")
    )  # fmt: skip


def _from_tensor(
    _: Makeable, data: object, dtype: object, device: object, gradient: object
) -> bool:
    name = dtype.name if isinstance(dtype, Global) else "float32"
    if name not in _COPIED or (gradient is True and not name.startswith(_FLOATING)):
        return kind(dtype) == "any"
    known = not isinstance(device, str) or is_device(device)
    made = data.args if isinstance(data, Call) and isinstance(data.args, tuple) else ()
    known = known and (len(made) < 4 or _fits(made[0], made[2]))
    return _is(data, "tensor") and known and _is(device, "text") and _is(gradient, "bool")


# Types into which others are turned.
_COPIED = frozenset(
    name for name in DTYPES if not name.startswith(("q", "bits", "float4"))
)  # fmt: skip


_WANTED: object = True  # a gradient


def _parameter(
    _: Makeable, data: object = None, gradient: object = _WANTED, _hooks: object = None,
    state: object = None,
) -> bool:  # fmt: skip
    if gradient is True and not _can_have_gradient(data):
        return False
    return _is(data, "tensor", "none") and _is(gradient, "bool") and _attributes(state)


def _can_have_gradient(made: object) -> bool:
    """Returns whether the numbers of a tensor are no whole ones, as far as it says."""
    for _ in range(_DEEPEST_WRAPPED):
        args = made.args if isinstance(made, Call) and kind(made) == "tensor" else None
        if not isinstance(made, Call) or not isinstance(args, tuple) or not args:
            return True
        name = made.full.removeprefix("torch._utils._rebuild_")
        if name in ("tensor", "tensor_v2", "qtensor"):
            return not _storage_of(args[0]) or STORAGES.get(_storage_of(args[0]), "").startswith(
                _FLOATING
            )
        at = {"tensor_v3": 6, "meta_tensor_no_storage": 0, "device_tensor_from_cpu_tensor": 1}
        if name in at:
            return not isinstance(args[at[name]], Global) or args[at[name]].name.startswith(
                _FLOATING
            )
        if made.full == "torch._tensor._rebuild_from_type_v2":
            made = Call(args[0], args[2])
        elif name == "sparse_tensor":
            coordinates = isinstance(args[0], Call) and args[0].args == ("torch.sparse_coo",)
            made = args[1][1 if coordinates else 2]
        else:
            made = args[0]
    return False


def _attributes(state: object) -> bool:
    """Returns whether a tensor can be given attributes."""
    if isinstance(state, tuple):
        return len(state) == 2 and all(map(_attributes, state))
    if not isinstance(state, PickleDict):
        return _is(state, "none", "dict")
    # What torch itself keeps at a tensor is not for a file to set.
    return all(isinstance(key, str) and key not in _OF_TENSORS for key, _ in state.pairs)


_OF_TENSORS = frozenset(
    ("H", "T", "data", "device", "dtype", "grad", "grad_dtype", "grad_fn", "imag", "is_leaf",
     "itemsize", "layout", "mH", "mT", "name", "names", "nbytes", "ndim", "output_nr", "real",
     "requires_grad", "retains_grad", "shape", "volatile", "_backward_hooks", "_base", "_cdata",
     "_grad", "_grad_fn", "_has_symbolic_sizes_strides", "_post_accumulate_grad_hooks",
     "_python_dispatch", "_version", "__cuda_array_interface__", "__weakref__", "__class__",
     "__dict__",
     *(f"is_{kind}" for kind in ("cpu", "cuda", "ipu", "maia", "meta", "mkldnn", "mps", "mtia",
       "nested", "quantized", "sparse", "sparse_csr", "vulkan", "xla", "xpu")))
)  # fmt: skip


def _of_type(m: Makeable, function: object, cls: object, args: object, state: object) -> bool:
    if not isinstance(function, Global) or not isinstance(cls, Global):
        return False
    if kind(cls) != "any" and cls.full not in ("torch.Tensor", PARAMETER):
        return False
    if kind(function) != "any" and _GIVES.get(function.full) != "tensor":
        return False
    return m.by_call(function, args) and _attributes(state)


def _size(_: Makeable, items: object = ()) -> bool:
    if isinstance(items, (list, tuple)):
        return all(_is(one, "int", "bool") and (not isinstance(one, int) or one in _INT64)
                   for one in items)  # fmt: skip
    return isinstance(items, Call) and items.full == "torch.Size"


_DEVICES = frozenset(
    ("cpu", "cuda", "ipu", "xpu", "mkldnn", "opengl", "opencl", "ideep", "hip", "ve", "fpga",
     "maia", "xla", "lazy", "vulkan", "mps", "meta", "hpu", "mtia", "privateuseone")
)  # fmt: skip
_DEVICE = re.compile(r"([a-z_]+)(?::(?:0|[1-9]\d{0,2}))?")


def is_device(name: str) -> bool:
    """Returns whether torch knows the name of a device."""
    found = _DEVICE.fullmatch(name)
    return found is not None and found[1] in _DEVICES


def _device(_: Makeable, name: object, index: object = None) -> bool:
    if isinstance(name, bytes):
        name = name.decode("utf-8", "replace")
    if isinstance(index, int) and not isinstance(index, bool):
        return isinstance(name, str) and name in _DEVICES and 0 <= index < 128
    return index is None and isinstance(name, str) and is_device(name)


def _layout(_: Makeable, name: object) -> bool:
    return name in _LAYOUTS if isinstance(name, str) else kind(name) == "any"


# What turns text into bytes, and cannot fail in ways of its own.
_ENCODINGS = frozenset(("ascii", "iso8859-1", "utf-8"))
_ERRORS = ("strict", "ignore", "replace", "surrogatepass", "backslashreplace")


def _encoded(
    _: Makeable, text: object, encoding: object = "utf-8", errors: object = "strict"
) -> bool:
    if not (_is(text, "text") and isinstance(encoding, str) and errors in _ERRORS):
        return False
    try:
        if codecs.lookup(encoding).name not in _ENCODINGS:
            return False
        if isinstance(text, str):
            text.encode(encoding, str(errors))
    except (LookupError, ValueError):
        return False
    return True


def _bytearray(m: Makeable, *given: object) -> bool:
    if len(given) == 2:
        return given[1] is not None and _encoded(m, *given)
    return not given or _is(given[0], "bytes")


def _complex(_: Makeable, *parts: object) -> bool:
    return all(
        _is(one, "int", "float", "bool") and (not isinstance(one, int) or abs(one) < 1 << 1000)
        for one in parts
    )


def _ordered(m: Makeable, items: object = ()) -> bool:
    if not isinstance(items, (list, tuple)):
        return _is(items, "dict") or items in ("", b"")
    return all(isinstance(o, (list, tuple)) and len(o) == 2 and m.as_key(o[0]) for o in items)


def _counter(m: Makeable, items: object = None) -> bool:
    return items is None or m.every_key(items)


def _set(m: Makeable, items: object = ()) -> bool:
    return m.every_key(items)


def _list(_: Makeable, items: object = ()) -> bool:
    return _is(items, "text", "list", "tuple", "dict", "set", "frozenset", "bytearray", "bytes")


# How many arguments a function takes, at least and at most, and which.
_TAKES: dict[str, tuple[int, int, Callable[..., bool]]] = {
    "torch._utils._rebuild_tensor": (4, 4, _tensor),
    "torch._utils._rebuild_tensor_v2": (6, 7, _tensor_v2),
    "torch._utils._rebuild_tensor_v3": (7, 8, _tensor_v3),
    "torch._utils._rebuild_qtensor": (7, 7, _quantised),
    "torch._utils._rebuild_sparse_tensor": (2, 2, _sparse),
    "torch._utils._rebuild_meta_tensor_no_storage": (4, 4, _without_storage),
    "torch._utils._rebuild_nested_tensor": (4, 4, _nested),
    "torch._utils._rebuild_wrapper_subclass": (8, 8, _wrapper),
    "torch._utils._rebuild_device_tensor_from_numpy": (4, 4, _from_array),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": (4, 4, _from_tensor),
    "torch._utils._rebuild_parameter": (3, 3, _parameter),
    "torch._utils._rebuild_parameter_with_state": (4, 4, _parameter),
    "torch._tensor._rebuild_from_type_v2": (4, 4, _of_type),
    PARAMETER: (0, 2, _parameter),
    "torch.Size": (0, 1, _size),
    "torch.device": (1, 2, _device),
    "torch.serialization._get_layout": (1, 1, _layout),
    ENCODE: (1, 3, _encoded),
    "builtins.bytearray": (0, 2, _bytearray),
    "builtins.complex": (0, 2, _complex),
    "builtins.set": (0, 1, _set),
    "builtins.frozenset": (0, 1, _set),
    "builtins.list": (0, 1, _list),
    "collections.OrderedDict": (0, 1, _ordered),
    "collections.Counter": (0, 1, _counter),
}
# Of which an empty object can be had without calling them.
_CLASSES = frozenset(("builtins.set", "collections.OrderedDict", "collections.Counter"))
