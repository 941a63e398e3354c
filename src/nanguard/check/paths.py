"""From what the user names to the files that are looked at, and what kind of file each is."""

from __future__ import annotations

import glob
import os
import re
import stat
from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from pathspec import GitIgnoreSpec

    from nanguard.check.scan import Scan

_NAME = ".gitignore"
_GITIGNORE_BYTES = 1 << 20


class Ignored:
    """Decides for every file and folder below a folder; folders are entered from the top."""

    def __init__(self, top: str, exclude: Iterable[str], root: str) -> None:
        """Reads the patterns that hold for a folder as a whole.

        Args:
            top: The folder that is walked.
            exclude: Patterns of the settings.
            root: The folder those are relative to.
        """
        self._specs: dict[str, GitIgnoreSpec] = {}
        self._root = _full(root)
        patterns = list(exclude)
        self._exclude = _spec(patterns) if patterns else None
        self._read_above(Path(_full(top)))

    def enter(self, folder: str, names: Collection[str]) -> None:
        """Reads the ``.gitignore`` of a folder, if there is one among its names."""
        if _NAME in names:
            self._read(_full(folder), _NAME)

    def __call__(self, path: str, *, folder: bool) -> bool:
        """Returns whether a file or folder is left out."""
        if not self._specs and self._exclude is None:
            return False
        full = _full(path)
        if self._exclude is not None and full.startswith(f"{self._root}/"):
            below = full[len(self._root) + 1 :]
            if _verdict(self._exclude, below, folder=folder):
                return True
        return self._by_git(full, folder=folder)

    def _by_git(self, full: str, *, folder: bool) -> bool:
        """Returns what the nearest ``.gitignore`` that speaks of a path says."""
        at = full.rfind("/")
        while at >= 0:
            spec = self._specs.get(full[:at] or "/")
            if spec is not None:
                verdict = _verdict(spec, full[at + 1 :], folder=folder)
                if verdict is not None:
                    return verdict
            at = full.rfind("/", 0, at)
        return False

    def _read_above(self, top: Path) -> None:
        """Reads the patterns of the repository a folder lies in."""
        above = [top, *top.parents]
        repository = next((folder for folder in above if (folder / ".git").exists()), None)
        if repository is None:
            return
        self._read(repository.as_posix(), ".git/info/exclude")
        for folder in above[1 : above.index(repository) + 1]:
            self._read(folder.as_posix(), _NAME)
        if top != repository and self._by_git(top.as_posix(), folder=True):
            # Whoever names an ignored folder means it.
            self._specs.clear()

    def _read(self, folder: str, name: str) -> None:
        try:
            with (Path(folder) / name).open(encoding="utf-8", errors="replace") as file:
                lines = file.read(_GITIGNORE_BYTES).splitlines()
        except OSError:
            return
        lines = [line for line in lines if line.strip() and not line.startswith("#")]
        spec = _spec(lines) if lines else None
        if spec is None:
            return
        known = self._specs.get(folder)
        self._specs[folder] = spec if known is None else known + spec


def _full(path: str) -> str:
    # Not resolved: what a link is called is what the patterns speak of.
    return os.path.abspath(path).replace(os.sep, "/")  # noqa: PTH100


def _spec(lines: list[str]) -> GitIgnoreSpec | None:
    from pathspec import GitIgnoreSpec

    good = []
    for line in lines:
        try:
            GitIgnoreSpec.from_lines([line])
        except ValueError:  # git overlooks patterns it does not understand, too
            continue
        good.append(line)
    return GitIgnoreSpec.from_lines(good) if good else None


def _verdict(spec: GitIgnoreSpec, below: str, *, folder: bool) -> bool | None:
    return spec.check_file(f"{below}/" if folder else below).include


STDIN = "-"
_SKIPPED = frozenset(
    (
        ".git", ".hg", ".svn", ".bzr", ".venv", "venv", ".env", ".tox", ".nox", ".eggs", ".direnv",
        ".pyenv", "__pypackages__", "node_modules", "site-packages", "dist-packages", "__pycache__",
        ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", ".ipynb_checkpoints",
        ".import_linter_cache", ".nanguard", ".vscode", ".idea", ".cache",
    )
)  # fmt: skip
_MARKS = ("pyvenv.cfg", "CACHEDIR.TAG")
_COPY = "_fixed"
_TESTS = re.compile(r"(^|/)((unit_?)?tests?|test_?(scripts?|cases|suite|runs|utils))/")
_STARS = re.compile(r"(?:^|(?<=/))\*\*(?:/|$)")


def in_tests(path: str) -> bool:
    """Returns whether a file lies in a folder of tests, going by the folder's name."""
    return _TESTS.search(path.replace("\\", "/")) is not None


@dataclass(frozen=True, slots=True)
class FoundFiles:
    """A file to look at.

    Attributes:
        path: The file, as the user would name it.
        named: Whether the user named it, rather than a folder it is in.
    """

    path: str
    named: bool


@dataclass(slots=True)
class Missed:
    """What was named or met and cannot be looked at.

    Attributes:
        path: The file or folder.
        reason: Why.
        spared: Whether it could be looked at, and is left out on purpose.
    """

    path: str
    reason: str
    spared: bool = False


@dataclass(slots=True)
class Search:
    """Walks what the user named, once.

    Attributes:
        exclude: Patterns, as in a ``.gitignore``, of what is left out of folders.
        root: The folder the patterns are relative to.
        missed: What could not be looked at, after the walk.
        existing: How many of the named paths there are, after the walk.
    """

    exclude: tuple[str, ...] = ()
    root: str = "."
    missed: list[Missed] = field(default_factory=list)
    existing: int = 0
    _seen: set[str] = field(default_factory=set)

    def files(self, paths: Iterable[str]) -> Iterator[FoundFiles]:
        """Yields every file once, in a fixed order."""
        for path in paths:
            yield from self._once(self._one(path))

    def _once(self, found: Iterable[FoundFiles]) -> Iterator[FoundFiles]:
        for file in found:
            key = os.path.abspath(file.path)  # noqa: PTH100 - a Path for every file of a tree is slow
            if key not in self._seen:
                self._seen.add(key)
                yield file

    def _one(self, path: str) -> Iterator[FoundFiles]:
        if path == STDIN:
            self.existing += 1
            yield FoundFiles(STDIN, named=True)
            return
        try:
            mode = os.stat(path).st_mode  # noqa: PTH116 - may be no path at all
        except (OSError, ValueError) as error:
            yield from self._absent(path, error)
            return
        self.existing += 1
        if stat.S_ISDIR(mode):
            yield from self._folder(path)
        elif stat.S_ISREG(mode):
            yield FoundFiles(path, named=True)
        else:
            self.missed.append(Missed(path, "it is not a regular file"))

    def _absent(self, path: str, error: OSError | ValueError) -> Iterator[FoundFiles]:
        if not isinstance(error, FileNotFoundError) or not glob.has_magic(path):
            known = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
            reason = f"it cannot be read: {error.strerror}" if known else "there is no such file"  # type: ignore[union-attr]
            self.missed.append(Missed(path, reason))
            return
        matches = sorted({m for m in _matching(path) if not is_skipped(m)})
        if not matches:
            self.missed.append(Missed(path, "no file matches this pattern"))
        for match in matches:
            if os.path.isfile(match):  # noqa: PTH113
                self.existing += 1
                yield FoundFiles(match, named=True)

    def _folder(self, top: str) -> Iterator[FoundFiles]:
        ignored = Ignored(top, self.exclude, self.root)
        stack = [top]
        while stack:
            folder = stack.pop()
            try:
                with os.scandir(folder) as entries:
                    members = sorted(entries, key=lambda entry: entry.name)
            except OSError as error:
                self.missed.append(Missed(folder, f"it cannot be read: {error.strerror}"))
                continue
            names = {entry.name for entry in members}
            if folder != top and not names.isdisjoint(_MARKS):
                continue
            ignored.enter(folder, names)
            yield from self._members(members, names, ignored, stack)

    def _members(
        self, members: list[os.DirEntry[str]], names: set[str], ignored: Ignored, stack: list[str]
    ) -> Iterator[FoundFiles]:
        below = []
        for entry in members:
            path = entry.path.removeprefix("./") if entry.path.startswith("./") else entry.path
            if entry.is_dir(follow_symlinks=False):
                if entry.name not in _SKIPPED and not ignored(path, folder=True):
                    below.append(path)
            elif ignored(path, folder=False):
                continue
            elif original := _original(entry.name, names):
                reason = f"it is the repaired copy of {original}; name it to check it"
                self.missed.append(Missed(path, reason, spared=True))
            elif _is_file(entry):
                yield FoundFiles(path, named=False)
        stack.extend(reversed(below))


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:
        return False


def is_skipped(path: str) -> bool:
    """Returns whether a file lies in a folder that nobody wants to be looked into."""
    return not _SKIPPED.isdisjoint(path.replace(os.sep, "/").split("/")[:-1])


def _matching(pattern: str) -> Iterator[str]:
    """Yields what a pattern matches; ``**`` follows no links, which may lead round in circles."""
    stars = _STARS.search(pattern)
    if stars is None:
        yield from glob.iglob(pattern)  # noqa: PTH207
        return
    above, below = pattern[: stars.start()], pattern[stars.end() :] or "*"
    for top in glob.iglob(above) if glob.has_magic(above) else [above]:  # noqa: PTH207
        for folder, names, _ in os.walk(top or "."):
            names[:] = [n for n in names if not n.startswith(".") and n not in _SKIPPED]
            start = glob.escape(folder.rstrip("/")) + "/"
            yield from _matching((start if top else start.removeprefix("./")) + below)


def _original(name: str, names: set[str]) -> str | None:
    stem, dot, ending = name.rpartition(".")
    if not stem.endswith(_COPY) or ending not in ("yaml", "yml", "json", "toml"):
        return None
    original = stem.removesuffix(_COPY) + dot + ending
    return original if original in names else None


KIND_BYTES = 8192
SCAN_HEAD = 64 << 10
# What the list of the files of a checkpoint is called.
INDEX = (".safetensors.index.json", ".bin.index.json")


class FileKind(str, Enum):
    """What can be done with a file."""

    PYTHON = "Python code"
    NOTEBOOK = "notebook"
    CONFIG = "configuration"
    DATA = "data"
    CHECKPOINT = "checkpoint"
    LOG = "log"
    BINARY = "binary file"
    OTHER = "other"


# What is scanned, by the name of the package that reads it; in the order in which they are asked.
SCANNED = {FileKind.LOG: "log", FileKind.DATA: "data", FileKind.CHECKPOINT: "checkpoint"}

_ENDINGS = {
    FileKind.PYTHON: ".py .pyw .pyi",
    FileKind.NOTEBOOK: ".ipynb",
    FileKind.CONFIG: ".yaml .yml .json .json5 .jsonc .toml",
    FileKind.DATA: ".csv .tsv .jsonl .ndjson .parquet .npy .npz .arrow .feather .h5 .hdf5 .lmdb "
    ".tfrecord .mat",
    FileKind.CHECKPOINT: ".pt .pth .ckpt .bin .safetensors .distcp .pkl .pickle .onnx .gguf",
    FileKind.LOG: ".log .tfevents .wandb",
    FileKind.OTHER: ".md .rst .html .css .js .ts .sh .bat .c .cc .cpp .cu .cuh .h .hpp .java .rs "
    ".go .lua .rb .png .jpg .jpeg .gif .svg .webp .ico .bmp .tif .tiff .mp3 .mp4 .wav .flac .ogg "
    ".avi .mov .mkv .webm .pdf .gz .bz2 .xz .zip .tar .tgz .7z .zst .whl .egg .so .dll .dylib .a "
    ".o .pyc .pyo .pyd .class .jar .exe .ttf .woff .woff2 .otf .lock .xml .tex .bib .patch .diff",
}
_BY_ENDING = {ending: kind for kind, endings in _ENDINGS.items() for ending in endings.split()}
_MAGIC = (
    (b"\x93NUMPY", FileKind.DATA),
    (b"PAR1", FileKind.DATA),
    (b"ARROW1", FileKind.DATA),
    (b"\x89HDF", FileKind.DATA),
    (b"PK\x03\x04", FileKind.CHECKPOINT),
    (b"\x80\x02", FileKind.CHECKPOINT),
    (b"GGUF", FileKind.CHECKPOINT),
)
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_SHEBANG = re.compile(rb"#!.*\bpython[\d.]*\b")
_IMPORT = re.compile(rb"^(?:import [\w.]+|from [\w.]+ import )", re.MULTILINE)
_DEFINITION = re.compile(rb"^(?:def|class) \w.*:\s*(?:#.*)?$", re.MULTILINE)
_KEY = re.compile(rb"^[ \t]*(?:- )?[\w.\"'/-]+[ \t]*(?::(?:\s|$)|=)", re.MULTILINE)
_TABLE = re.compile(rb"^\[\[?[\w.\"' -]+\]\]?\s*$", re.MULTILINE)
_CALLED_CONFIG = re.compile(r"^[^.]*$|conf|cfg|settings|h?params|options|\.(?:ini|gin|yaml|yml)")
_STEP = re.compile(rb"\b(?:step|epoch|iter)(?:\w*\d|\w*\W{1,3}\d)")
_LOSS = re.compile(rb"\bloss")
_DATA = re.compile(
    r"data|train_(?:dir|path|file)|"
    r"\.(?:jsonl?|ndjson|jsonlines|[ct]sv|parquet|pq|arrow|feather|np[yz]|safetensors)\b",
    re.IGNORECASE,
)
_TRAINING = re.compile(
    rb"lr\b|learning|optim|batch|epoch|precision|float16|fp16|bf16|train|gradient|grad_|sched|"
    rb"accumul|max_steps|warm|weight_decay|zero_opt|deepspeed|distributed|mixed|loss|num_labels|"
    rb"num_classes|dropout|clip|checkpoint|ckpt|_target_|seed",
    re.IGNORECASE,
)


def by_name(name: str) -> FileKind | None:
    """Returns the kind a file's name promises; None if the name says nothing."""
    path = PurePath(name)
    if ".tfevents." in path.name or path.name == "trainer_state.json":
        return FileKind.LOG
    if path.name.endswith(INDEX):
        return FileKind.CHECKPOINT
    kind = _BY_ENDING.get(path.suffix.lower())
    if kind is FileKind.OTHER:  # packed, or by an old habit: model.pth.tar
        inner = _BY_ENDING.get(PurePath(path.stem).suffix.lower())
        return inner if inner in SCANNED else kind
    return kind


def kind_of(name: str, head: bytes) -> FileKind:
    """Returns the kind of a file.

    Args:
        name: The file's name.
        head: Its first bytes; ``KIND_BYTES`` of them are enough.
    """
    guess = by_name(name)
    for magic, kind in _MAGIC:
        if head.startswith(magic):
            return guess if guess in SCANNED else kind
    if b"\0" in head and not head.startswith(_UTF16):
        return guess if guess in SCANNED else FileKind.BINARY
    if guess is FileKind.CONFIG or guess is None:
        return _by_content(name, head, guess)
    return guess


def may_be_scanned(name: str) -> bool:
    """Returns whether a file may hold data, a checkpoint or a log, going by its name."""
    kind = by_name(name)
    return kind is None or kind in SCANNED or name.lower().endswith(".json")


def scanned_as(path: str, head: bytes) -> FileKind | None:
    """Returns whether a file holds data, a checkpoint or a log; None if none of them.

    Args:
        path: The file.
        head: Its first bytes; ``SCAN_HEAD`` of them.
    """
    # Asking costs an import, and nobody has to look at what can be told here.
    if kind_of(path, head[:KIND_BYTES]) not in SCANNED:
        if not may_be_scanned(path) or _SHEBANG.match(head):
            return None
        if kind_of(path, head[:KIND_BYTES]) is FileKind.NOTEBOOK or not head.strip():
            return None
    for kind in _asked(path, head):
        if reader(SCANNED[kind]).recognises(Path(path), head):
            return kind
    return None


def _asked(path: str, head: bytes) -> list[FileKind]:
    """Returns whose readers are asked about a file, in their order."""
    kinds = list(SCANNED)
    # Nobody but the reader of checkpoints knows these; the import of the others can be saved.
    packed = head.startswith((b"PK\x03\x04", b"\x80")) and b".npy" not in head
    if packed and by_name(path) is FileKind.CHECKPOINT:
        kinds.sort(key=lambda kind: kind is not FileKind.CHECKPOINT)
    return kinds


class Source(Protocol):
    """What rules read: a data set, a checkpoint or a log."""

    @property
    def path(self) -> str:
        """The file or folder that stands for it."""

    @property
    def read_from(self) -> Sequence[str]:
        """Every file it was read from."""

    @property
    def not_read(self) -> Sequence[tuple[str, str]]:
        """What of it could not be read, each with the reason."""


class SourceReader(Protocol):
    """What a package that reads data, checkpoints or logs can do."""

    def recognises(self, path: Path, head: bytes) -> bool:
        """Returns whether a file is of its kind."""

    def recognises_folder(self, path: Path) -> bool:
        """Returns whether a folder is one source of its kind."""

    def open_sources(self, paths: Sequence[Path], scan: Scan) -> Iterator[Source]:
        """Yields what its rules read."""


def reader(name: str) -> SourceReader:
    """Returns what reads one kind of source.

    Args:
        name: ``data``, ``checkpoint`` or ``log``.
    """
    return cast("SourceReader", import_module(f"nanguard.check.{name}.{name}_reader"))


def may_point(content: str) -> bool:
    """Returns whether a configuration may name data to train on."""
    return _DATA.search(content) is not None


def may_configure(content: bytes) -> bool:
    """Returns whether any word of a training configuration occurs in a file."""
    return _TRAINING.search(content) is not None


def is_called_a_configuration(path: str) -> bool:
    """Returns whether a file's name says that it holds settings."""
    return _CALLED_CONFIG.search(PurePath(path).name.lower()) is not None


def _by_content(name: str, head: bytes, guess: FileKind | None) -> FileKind:
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if start[:1] in (b"{", b"["):
        return _json(start, guess)
    if guess is not None:
        return guess
    if _SHEBANG.match(head):
        return FileKind.PYTHON
    if head.startswith(b"#!"):
        return FileKind.OTHER
    if sum(map(_is_step, head.lower().splitlines())) >= 3:
        return FileKind.LOG
    if _IMPORT.search(head) or _DEFINITION.search(head):
        return FileKind.PYTHON
    lines = [line for line in head.splitlines() if line.strip() and line.lstrip()[:1] != b"#"]
    if not is_called_a_configuration(name):
        return FileKind.OTHER  # notes, logs and the formats of other programs have keys as well
    keys = len(_KEY.findall(head)) + len(_TABLE.findall(head))
    return FileKind.CONFIG if lines and keys * 2 >= len(lines) else FileKind.OTHER


def _is_step(line: bytes) -> bool:
    """Returns whether a line, in lower case, names a numbered step and then a loss."""
    at = -1
    for found in _LOSS.finditer(line):
        at = found.start()
    return at >= 0 and _STEP.search(line, 0, at) is not None


def _json(start: bytes, guess: FileKind | None) -> FileKind:
    if b'"nbformat"' in start or (b'"cells"' in start and b'"cell_type"' in start):
        return FileKind.NOTEBOOK
    if b'"log_history"' in start:
        return FileKind.LOG
    first, _, rest = start.partition(b"\n")
    if guess is None and first.rstrip().endswith(b"}") and rest.lstrip()[:1] == b"{":
        return FileKind.DATA
    return FileKind.CONFIG
