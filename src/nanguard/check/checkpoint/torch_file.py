"""Files that torch wrote: zip archives, the older format, pickles; and what those may ask for."""

from __future__ import annotations

import pickletools
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nanguard.check.checkpoint.byte_ranges import (
    Blob,
    DamagedError,
    Entry,
    MemoryBlob,
    TooLargeError,
    UnreadableError,
    Window,
    data_offset,
    read,
    read_directory,
    unpacked,
)
from nanguard.check.checkpoint.pickle_reader import Pickled, read_pickle
from nanguard.check.checkpoint.tensor_tree import TensorTree, walk
from nanguard.check.checkpoint.tensors import (
    ALLOWED,
    Global,
    Persistent,
    Span,
    Storage,
    storage_type,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nanguard.check.checkpoint.tensors import Dtype

# Plain data of numpy and of Python: the states of random generators are made of it.
_PLAIN = re.compile(
    r"numpy\.(?:_?core\.multiarray\.(?:_reconstruct|scalar)|_?core\.numeric\._frombuffer|ndarray"
    r"|dtype|dtypes\.\w+|random\.\w+\.\w+)|_codecs\.encode|builtins\.(?:bytes|tuple|list|dict)"
    r"|argparse\.Namespace|types\.SimpleNamespace|pathlib\.\w+|datetime\.\w+|easydict\.EasyDict"
    r"|yacs\.config\.CfgNode|the pickle instruction \w+|the source of a module"
)

# Files of the settings of a run, which hold objects of the library that wrote them and which no
# resume reads, and of random generators.
_SETTINGS = re.compile(r"training_args\.bin|(?:rng_state|random_states?)\S*\.(?:pth?|pkl|bin)")
_LIBRARY = re.compile(
    r"(?:transformers\.(?:training_args\w*|trainer_\w+|integrations\.deepspeed|debug_utils)"
    r"|accelerate\.(?:state|utils\.(?:dataclasses|deepspeed))|trl\.trainer\.\w+_config"
    r"|torch\.distributed\.\w+|datetime|collections|enum)\.[A-Za-z]*[A-Z]\w*|datetime\.timedelta"
    r"|pathlib\.(?:Pure)?(?:Posix|Windows)?Path"
)
# How torch itself describes the parts of a distributed checkpoint.
_METADATA = re.compile(
    r"torch\.distributed\.(?:checkpoint|_shard)\.[\w.]+\._?[A-Z]\w*|pathlib\.(?:Pure)?\w*Path"
)

_RUNS_CODE = re.compile(
    r"(?:os|posix|nt|sys|subprocess|socket|shutil|pty|runpy|importlib|pip|commands|ctypes|code"
    r"|webbrowser|multiprocessing|asyncio|_posixsubprocess|requests|urllib|bdb|pdb|timeit|cProfile"
    r"|operator|functools|pickle|_pickle|dill|cloudpickle)(?:\..+)|builtins\.(?:eval|exec|compile"
    r"|open|__import__|getattr|setattr|delattr|globals|breakpoint|input|vars|map|apply)"
    r"|torch\.(?:load|hub\..+|_inductor\..+|jit\..+)|numpy\.testing\..+"
)


def beyond_weights_only(names: Iterable[str], file: str, *, script: bool = False) -> list[str]:
    """Returns what a pickle needs that torch would refuse with ``weights_only=True``.

    Args:
        names: What it asks for.
        file: The name of its file.
        script: Whether it is part of a compiled program.
    """
    found = []
    for name in names:
        if name in ALLOWED or (script and name.startswith(("__torch__", "torch.jit._pickle."))):
            continue
        if _SETTINGS.fullmatch(file) and (_PLAIN.fullmatch(name) or _LIBRARY.fullmatch(name)):
            continue
        if file == ".metadata" and _METADATA.fullmatch(name):
            continue
        found.append(name)
    return found


def runs_code(name: str) -> bool:
    """Returns whether a function does as it is told, so that a pickle can make it do anything."""
    return _RUNS_CODE.fullmatch(name) is not None


def plain_data(name: str) -> bool:
    """Returns whether a class only holds numbers, or the settings of a run."""
    return _PLAIN.fullmatch(name) is not None


MAGIC = 0x1950A86A20F9469CFC6C
# The only version there ever was of the older format.
VERSION = 1001
MAX_NESTED = 1000
# What torch saves is called so; other programs put several pickles into one file.
_OF_TORCH = (".pt", ".pth", ".ckpt")
# Of all compressed files of an archive together.
MAX_UNPACKED_IN_ALL = 1 << 26


@dataclass(slots=True)
class TorchFile:
    """What a file of torch holds.

    Attributes:
        tree: Its tensors.
        names: Every class and function that loading would look up.
        script: Whether it is a compiled program, which torch loads without Python's pickle.
    """

    tree: TensorTree
    names: dict[str, Global] = field(default_factory=dict)
    script: bool = False


def read_torch(blob: Blob) -> TorchFile:
    """Reads a file of torch by what it begins with.

    Raises:
        DamagedError: It is not whole.
        TooLargeError: It would cost more than a checkpoint of its size may.
    """
    return _read(blob, _Nesting())


@dataclass(slots=True)
class _Nesting:
    """Files inside files, which are counted."""

    left: int = MAX_NESTED


def _read(blob: Blob, nesting: _Nesting) -> TorchFile:
    if read(blob, 0, 4) == b"PK\3\4":
        return _archive(blob, nesting)
    first = read_pickle(blob)
    if first.value == MAGIC:
        _note_instruction(_refuse_outside(first))
        found = _legacy(blob, first.end, nesting)
        found.names = {**first.names, **found.names}
        return found
    if isinstance(first.value, int) and first.end < blob.size:
        raise DamagedError(f"it begins with the number {first.value:#x}, not with that of torch")
    _refuse_outside(first)
    if first.end < blob.size and Path(blob.path).suffix in _OF_TORCH:
        more = blob.size - first.end
        raise DamagedError(f"it is a pickle with {more:,} bytes behind it, which torch cannot load")
    if Path(blob.path).suffix in _OF_TORCH:
        _note_instruction(first)
    return TorchFile(_walked(first, _Outside(blob, nesting)), first.names)


def _pickle_of_torch(blob: Blob, at: int = 0) -> Pickled:
    """Reads a pickle of torch's own format."""
    return _note_instruction(read_pickle(blob, at))


def _note_instruction(pickled: Pickled) -> Pickled:
    """Notes, beside the names that a pickle asks for, what else torch refuses by default in it."""
    if pickled.beyond is not None:
        code = pickled.beyond.decode("latin-1")
        (name,) = (opcode.name for opcode in pickletools.opcodes if opcode.code == code)
        _note(pickled, f"the pickle instruction {name}")
    return pickled


def _note(pickled: Pickled, said: str) -> None:
    pickled.names.setdefault(said, Global("", said))


class _Outside:
    """Finds the bytes of a plain pickle: all of them are in it."""

    def __init__(self, blob: Blob, nesting: _Nesting) -> None:
        self.blob = blob
        self.nesting = nesting

    def storage(self, key: object, nbytes: int) -> Storage:
        """Raises, since a pickle alone has nothing outside."""
        raise DamagedError(f"the storage {str(key)[:40]!r} of {nbytes:,} bytes is not in the file")

    def span(self, data: Span | bytes) -> Storage:
        """Returns bytes of the pickle."""
        if isinstance(data, bytes):
            return Storage(MemoryBlob(self.blob.path, data), 0, len(data))
        return Storage(self.blob, data.offset, data.size)

    def nested(self, data: Span | bytes) -> tuple[Storage, Dtype] | None:
        """Returns the storage in a file within the pickle."""
        self.nesting.left -= 1
        if self.nesting.left < 0:
            return None
        inner = self.span(data)
        blob = Window(inner.blob, inner.offset, inner.nbytes)
        if read(blob, 0, 4) == b"PK\3\4":
            return None
        first = read_pickle(blob)
        if first.value != MAGIC:
            return None
        pickled, storages = _legacy_parts(blob, first.end)
        found = pickled.value.key if isinstance(pickled.value, Persistent) else None
        if not isinstance(found, tuple) or len(found) < 5:
            return None
        dtype, storage = storage_type(found[1]), storages.get(str(found[2]))
        return None if dtype is None or storage is None else (storage, dtype)


class _Archived(_Outside):
    """Finds the bytes of an archive: every storage is a file in it."""

    def __init__(
        self, blob: Blob, pickle: Blob, entries: dict[str, Entry], prefix: str, nesting: _Nesting
    ) -> None:
        super().__init__(pickle, nesting)
        self.archive = blob
        self.entries = entries
        self.prefix = prefix
        self.swapped = False
        self.known: dict[str, Storage] = {}
        self.room = blob.size
        self.unpacked = 0

    def storage(self, key: object, nbytes: int) -> Storage:
        """Returns the file of a storage."""
        name = self._name(key)
        if name not in self.known:
            entry = self.entries.get(name)
            if entry is None:
                raise DamagedError(f"{name} is not in the archive")
            self.known[name] = self._file(entry)
        found = self.known[name]
        if found.nbytes != nbytes:
            raise DamagedError(f"{name} has {found.nbytes:,} bytes of {nbytes:,}")
        return found

    def has_read(self, key: object) -> bool:
        """Returns whether the file of a storage was looked for already, and is there."""
        return self._name(key) in self.known

    def _name(self, key: object) -> str:
        return f"{self.prefix}{str(key)[:200]}"

    def _file(self, entry: Entry) -> Storage:
        begin = data_offset(self.archive, entry)
        self.room -= entry.packed
        if self.room < 0:
            raise TooLargeError("files of the archive lie on top of each other")
        if not entry.method:
            return Storage(self.archive, begin, entry.packed, self.swapped)
        self.unpacked += entry.size
        if self.unpacked > MAX_UNPACKED_IN_ALL:
            raise TooLargeError("the archive is compressed, which torch never does")
        return Storage(unpacked(self.archive, entry), 0, entry.size, self.swapped)


def _archive(blob: Blob, nesting: _Nesting) -> TorchFile:
    entries = read_directory(blob)
    root = _root(blob, entries)
    script = f"{root}constants.pkl" in entries  # by which torch tells a compiled program
    if script != any(name.startswith(f"{root}code/") for name in entries):
        raise DamagedError("the archive has only a part of a compiled program")
    pickle = _part(blob, entries[f"{root}data.pkl"])
    sources = _Archived(blob, pickle, entries, f"{root}data/", nesting)
    order = entries.get(f"{root}byteorder")
    if order is not None:
        written = read(_part(blob, order), 0, 16)
        if written not in (b"little", b"big"):
            raise DamagedError(f"the order of its bytes is {written!r}")
        sources.swapped = written == b"big"
    _refuse_words(blob, entries, root)
    pickled = _pickle_of_torch(pickle)
    if script and not any(name.startswith("__torch__.") for name in pickled.names):
        raise DamagedError("the archive has the code of a compiled program, and no object of it")
    _require_storages(pickled, _ARCHIVED_STORAGE)
    found = TorchFile(_walked(pickled, sources), pickled.names, script)
    found.tree.damage += _unused_storages(pickled, sources)
    constants = entries.get(f"{root}constants.pkl")
    if script and constants is not None:
        pickle = _part(blob, constants)
        more = _Archived(blob, pickle, entries, f"{root}constants/", nesting)
        found.tree.tensors += walk(read_pickle(pickle).value, more).tensors
    return found


def _root(blob: Blob, entries: dict[str, Entry]) -> str:
    """Returns the folder in which all files of an archive lie; makes sure that they are there."""
    pickles = [name for name in entries if name == "data.pkl" or name.endswith("/data.pkl")]
    if not pickles:
        raise DamagedError("the archive has no data.pkl, which says what is in it")
    root = min(pickles, key=len).removesuffix("data.pkl")
    if root.count("/") != 1:
        raise DamagedError(f"data.pkl lies in {root[:100]!r}, and not in a folder of the archive")
    if not {f"{root}version", f"{root}.data/version"} & entries.keys():
        raise DamagedError("the archive has no version, which torch asks for first")
    for name, entry in entries.items():  # torch refuses an archive of which one file is not there
        data_offset(blob, entry)
        if not name.startswith(root):
            raise DamagedError(f"{name[:100]!r} in the archive does not lie in {root[:100]!r}")
    return root


# How many parts a reference to a storage has: the word, type, key, device and number of elements;
# the older format has the part of another storage that it may be as well.
_ARCHIVED_STORAGE, _LINED_STORAGE = 5, 6


def _require_storages(pickled: Pickled, parts: int) -> None:
    """Raises DamagedError if a reference to a storage is none that torch can follow.

    Args:
        pickled: What refers to storages.
        parts: Of how many parts a reference is made.
    """
    known: dict[object, object] = {}
    for one in pickled.outside:
        key = one.key if isinstance(one.key, tuple) else ()
        if not key:
            raise DamagedError("a reference to a storage has no parts")
        if key[0] in ("module", b"module"):  # with its source, as torch wrote them at first
            _note(pickled, "the source of a module")
            continue
        if len(key) != parts:
            raise DamagedError(f"a reference to a storage has {len(key)} parts, not {parts}")
        made = key[1]
        if isinstance(made, Global) and made.full not in ALLOWED:
            continue
        if storage_type(made) is None or (parts == _LINED_STORAGE and _is_untyped(made)):
            raise DamagedError(f"the storage {_key(key[2])} has no type")
        _require_place(key)
        said = known.setdefault((type(key[2]), _key(key[2])), (made, key[4]))
        if said != (made, key[4]):
            raise DamagedError(f"the storage {_key(key[2])} is described in two ways")


def _require_place(key: tuple[object, ...]) -> None:
    """Raises DamagedError if it is not said where a storage is, and how long."""
    name, place, count, *view = key[2:]
    if type(count) is not int or count < 0 or not isinstance(name, (str, bytes, int)):
        raise DamagedError(f"the storage {_key(name)} does not say how long it is")
    if not isinstance(place, (str, bytes)) or _PLACE.fullmatch(_key(place)) is None:
        raise DamagedError(f"the storage {_key(name)} lies on {str(place)[:40]!r}, no device")
    if view and view[0] is not None and not (isinstance(view[0], tuple) and len(view[0]) == 3):
        raise DamagedError("a reference to a part of a storage does not say which part")


def _is_untyped(made: object) -> bool:
    return isinstance(made, Global) and made.name == "UntypedStorage"


# Devices have names; those of other makers are their own.
_PLACE = re.compile(r"[a-z][a-z0-9_]{0,40}(?::\d{1,4})?")


def _refuse_outside(pickled: Pickled) -> Pickled:
    """Returns a pickle that is whole by itself; raises DamagedError for any other."""
    if pickled.outside:
        raise DamagedError("a pickle refers to something outside of it that nobody can give it")
    return pickled


def _references(pickled: Pickled) -> list[tuple[object, ...]]:
    """Returns what is said of storages, once for each time that it is said."""
    keys = (one.key for one in pickled.outside if isinstance(one.key, tuple))
    return [key for key in keys if len(key) >= _ARCHIVED_STORAGE]


def _unused_storages(pickled: Pickled, sources: _Archived) -> Iterator[str]:
    """Yields what is wrong with storages that no tensor uses, which torch reads all the same."""
    for key in _references(pickled):
        if sources.has_read(key[2]):
            continue
        dtype, count = storage_type(key[1]), key[4]
        if dtype is not None and isinstance(count, int) and count >= 0:
            try:
                sources.storage(key[2], dtype.nbytes(count))
            except DamagedError as error:
                yield str(error)


_LONGEST_NUMBER = 1 << 12  # bytes
_FIRST_FORMAT, _LAST_FORMAT = 1, 10  # the versions of the archive that torch reads


def _refuse_words(blob: Blob, entries: dict[str, Entry], root: str) -> None:
    """Refuses what torch fails on before it comes to the tensors.

    Raises:
        DamagedError: The version is none that torch reads, the alignment of storages is no number,
            or the mark of the writer no text.
    """
    for name in ("version", ".data/version"):
        entry = entries.get(f"{root}{name}")
        if entry is None:
            continue
        version = _number_in(_part(blob, entry))
        if version is None:
            raise DamagedError("the version of its format is no number")
        if not _FIRST_FORMAT <= version <= _LAST_FORMAT:
            raise DamagedError(
                f"the version of its format is {str(version)[:40]}, "
                f"and torch reads {_FIRST_FORMAT} to {_LAST_FORMAT}"
            )
    alignment = entries.get(f"{root}.storage_alignment")
    if alignment is not None and _number_in(_part(blob, alignment)) is None:
        raise DamagedError("the alignment of its storages is no number")
    mark = entries.get(f"{root}.data/serialization_id")
    if mark is not None:
        try:
            read(_part(blob, mark), 0, 1 << 12).decode("utf-8")
        except UnicodeDecodeError as error:
            raise DamagedError("its serialization_id is no text") from error


def _number_in(part: Blob) -> int | None:
    """Returns the whole number of a file that holds nothing else but space; None for others."""
    data = read(part, 0, _LONGEST_NUMBER + 1)
    if len(data) > _LONGEST_NUMBER or not data.strip().isdigit():
        return None
    return int(data)


def _walked(pickled: Pickled, sources: _Outside) -> TensorTree:
    try:
        return walk(pickled.value, sources, pickled.calls)
    except UnreadableError as error:
        error.names = {**pickled.names, **error.names}
        raise


def _part(blob: Blob, entry: Entry) -> Blob:
    if entry.method:
        return unpacked(blob, entry)
    return Window(blob, data_offset(blob, entry), entry.packed)


def _legacy(blob: Blob, at: int, nesting: _Nesting) -> TorchFile:
    pickled, storages = _legacy_parts(blob, at)
    sources = _Lined(blob, storages, nesting)
    return TorchFile(_walked(pickled, sources), pickled.names)


class _Lined(_Outside):
    """Finds the bytes of the older format: storages stand one behind another."""

    def __init__(self, blob: Blob, storages: dict[str, Storage], nesting: _Nesting) -> None:
        super().__init__(blob, nesting)
        self.storages = storages

    def storage(self, key: object, nbytes: int) -> Storage:
        """Returns a storage that was found behind the pickles."""
        found = self.storages.get(_key(key))
        if found is None:
            return super().storage(key, nbytes)
        if found.nbytes < nbytes:
            raise DamagedError(f"the storage {_key(key)} has {found.nbytes:,} bytes of {nbytes:,}")
        return found


def _legacy_parts(blob: Blob, at: int) -> tuple[Pickled, dict[str, Storage]]:
    """Returns the object and the storages of the older format.

    Args:
        blob: The file.
        at: Where the pickle of the magic number ends.
    """
    names: dict[str, Global] = {}
    try:
        for version in (VERSION, None):  # that of the format; then facts about the machine
            about = _refuse_outside(_pickle_of_torch(blob, at))
            names, at = {**names, **about.names}, about.end
            if version is not None and about.value != version:
                raise DamagedError(f"the version of its format is {str(about.value)[:40]}")
        pickled = _pickle_of_torch(blob, at)
        names = pickled.names = {**names, **pickled.names}
        return pickled, _lined_up(blob, pickled)
    except UnreadableError as error:
        error.names = {**names, **error.names}
        raise


def _lined_up(blob: Blob, pickled: Pickled) -> dict[str, Storage]:
    """Returns the storages behind a pickle of the older format."""
    listed = _refuse_outside(_pickle_of_torch(blob, pickled.end))
    pickled.names = {**pickled.names, **listed.names}
    if not isinstance(listed.value, list):
        raise DamagedError("the list of storages makes no sense")
    _require_storages(pickled, _LINED_STORAGE)
    if "torch._utils._rebuild_nested_tensor" in pickled.names:
        raise DamagedError("the older format cannot hold tensors that are nested")
    types: dict[str, tuple[Dtype, object]] = {}
    references = _references(pickled)
    for key in references:
        dtype = storage_type(key[1])
        if dtype is not None:
            types.setdefault(_key(key[2]), (dtype, key[4]))
    storages: dict[str, Storage] = {}
    at = listed.end
    if len({type(key) is int for key in (*listed.value, *(key[2] for key in references))}) > 1:
        raise DamagedError("storages are called by numbers and by words")
    for name in map(_key, listed.value):
        head = read(blob, at, 8)
        if name not in types or len(head) < 8:
            raise DamagedError(f"the file ends before the storage {name}")
        count = struct.unpack("<q", head)[0]
        dtype, wanted = types[name]
        if count != wanted:
            raise DamagedError(
                f"the storage {name} has {count:,} elements instead of {str(wanted)[:40]}"
            )
        nbytes = dtype.nbytes(count) if count >= 0 else -1
        if nbytes < 0 or at + 8 + nbytes > blob.size:
            raise DamagedError(
                f"the storage {name} has {count:,} elements and the file ends before"
            )
        storages[name] = Storage(blob, at + 8, nbytes)
        at += 8 + nbytes
    return storages


def _key(key: object) -> str:
    return key.decode("utf-8", "replace") if isinstance(key, bytes) else str(key)[:200]
