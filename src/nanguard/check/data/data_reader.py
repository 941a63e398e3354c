"""Data sets from files: the way in for everything that checks data."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanguard.check.data.dataset import DataFile, DataSet, Request, WatchedValues
from nanguard.check.data.formats import ENDINGS, read_file, recognises, recognises_folder
from nanguard.check.data.pointers import from_config, from_document
from nanguard.check.scan import Expected
from nanguard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from nanguard.check.scan import Scan

MAX_BESIDE_BYTES = 32 << 20
_TEXTS = ("labels.txt", "classes.txt", "class_names.txt", "label_names.txt", "label_list.txt")
_MAPS = (
    "classes.json",
    "class_names.json",
    "label_map.json",
    "label2id.json",
    "id2label.json",
    "label_names.json",
    "labels.json",
    "class_to_idx.json",
)
_INFOS = ("dataset_info.json", "dataset_infos.json", "info.json", "meta.json", "metadata.json")


@dataclass(frozen=True, slots=True)
class Named:
    """What files beside the data say.

    Attributes:
        classes: How many classes are named; None if none are.
        label_key: The column with those classes; None if that is not said.
        file: The file that names them.
        vocabulary: How many tokens there are; None if that is not said.
    """

    classes: int | None = None
    label_key: str | None = None
    file: str | None = None
    vocabulary: int | None = None


def named_beside(folder: Path) -> Named:
    """Returns what files in a folder say about the data in it."""
    found = _classes(folder)
    return replace(found, vocabulary=_vocabulary(folder))


def with_names(expected: Expected, named: Named) -> Expected:
    """Returns what is expected, completed by what is named; what is there already counts more."""
    return replace(
        expected,
        classes=expected.classes if expected.classes is not None else named.classes,
        label_key=expected.label_key or named.label_key,
        vocabulary=expected.vocabulary if expected.vocabulary is not None else named.vocabulary,
    )


def class_label(features: Any) -> tuple[str, int] | None:
    """Returns the column of classes that the description of a data set names, and their number."""
    found = []
    for name, feature in features.items() if isinstance(features, dict) else ():
        inner = feature
        for _ in range(3):
            if isinstance(inner, dict) and isinstance(inner.get("feature"), dict):
                inner = inner["feature"]
        names = inner.get("names") if isinstance(inner, dict) else None
        if isinstance(names, dict):  # the form that cards of data sets have
            names = list(names.values())
        if isinstance(names, list) and len(names) > 1:
            found.append((str(name), len(names)))
    return found[0] if len(found) == 1 else None


def _classes(folder: Path) -> Named:
    for name in _INFOS:
        found = class_label(_features(_load(folder / name)))
        if found is not None:
            return Named(found[1], found[0], str(folder / name))
    for name in _TEXTS:
        lines = _lines(folder / name)
        if lines and _are_names(lines):
            return Named(len(lines), file=str(folder / name))
    for name in _MAPS:
        count = _count(_load(folder / name))
        if count is not None:
            return Named(count, file=str(folder / name))
    return Named()


def _are_names(lines: list[str]) -> bool:
    """Returns whether lines name classes, rather than being the labels of records."""
    several = len(lines) > 1 and len(set(lines)) == len(lines)
    return several and not any(line.strip().lstrip("-").isdigit() for line in lines)


def _features(info: Any) -> Any:
    if not isinstance(info, dict):
        return None
    if "features" in info:
        return info["features"]
    inner = [value for value in info.values() if isinstance(value, dict)]
    return inner[0].get("features") if len(inner) == 1 else None


def _count(value: Any) -> int | None:
    """Returns how many classes a list of names, or a map of names and ids, has."""
    if isinstance(value, list):
        return len(value) if len(value) > 1 and all(isinstance(v, str) for v in value) else None
    if not isinstance(value, dict) or len(value) < 2:
        return None
    ids = [v for v in value.values() if isinstance(v, int) and not isinstance(v, bool)]
    if len(ids) != len(value):
        ids = [int(key) for key in value if str(key).isdigit()]
        if not all(isinstance(v, str) for v in value.values()):
            return None
    if len(ids) != len(value) or sorted(ids) != list(range(len(ids))):
        return None
    return len(ids)


def _vocabulary(folder: Path) -> int | None:
    for name in ("meta.json", "metadata.json", "info.json", "dataset_info.json"):
        info = _load(folder / name)
        size = info.get("vocab_size") if isinstance(info, dict) else None
        if isinstance(size, int) and not isinstance(size, bool) and size > 1:
            return size
    tokenizer = _load(folder / "tokenizer.json")
    if isinstance(tokenizer, dict) and isinstance(tokenizer.get("model"), dict):
        return _tokens(tokenizer)
    lines = _lines(folder / "vocab.txt")
    return len(lines) if lines and len(lines) > 1 else None


def _tokens(tokenizer: dict[str, Any]) -> int | None:
    vocabulary = tokenizer["model"].get("vocab")
    if not isinstance(vocabulary, (dict, list)) or len(vocabulary) < 2:
        return None
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    added = tokenizer.get("added_tokens")
    more = [t.get("id") for t in added if isinstance(t, dict)] if isinstance(added, list) else []
    known = [one for one in [*ids, *more] if isinstance(one, int)]
    return max(known) + 1 if known else None


def _lines(path: Path) -> list[str] | None:
    data = _bytes(path)
    if data is None:
        return None
    return [line for line in data.decode("utf-8", "replace").splitlines() if line.strip()]


def _load(path: Path) -> Any:
    data = _bytes(path)
    try:
        return None if data is None else json.loads(data)
    except (ValueError, RecursionError):
        return None


def _bytes(path: Path) -> bytes | None:
    try:
        if not path.is_file() or path.stat().st_size > MAX_BESIDE_BYTES:
            return None
        return path.read_bytes()
    except OSError:
        return None


__all__ = [
    "from_config",
    "from_document",
    "open_sources",
    "read_request",
    "recognises",
    "recognises_folder",
]

MAX_BESIDE = 20  # configurations in a folder that are searched for the data in it
_CONFIGS = (".yaml", ".yml", ".json", ".toml")


def open_sources(
    paths: Sequence[Path], scan: Scan, requests: Sequence[Request] = ()
) -> Iterator[DataSet]:
    """Yields data sets, each read as a whole.

    Args:
        paths: Files, and folders that are one data set each.
        scan: How to scan, and what the user expects.
        requests: What configurations say, from ``from_config``; their files are read once, with
            what is expected of them, also where they are among the paths.
    """
    taken: set[Path] = set()
    asked: list[tuple[tuple[Path, ...], Expected]] = []
    for request in requests:
        taken |= {path.resolve() for path in request.paths}
        question = (tuple(path.resolve() for path in request.paths), request.expected)
        if question not in asked or not request.paths:
            asked.append(question)
            yield read_request(request, scan)
    left = [path for path in paths if path.resolve() not in taken]
    for request in _alone(left):
        yield read_request(request, scan)


def read_request(request: Request, scan: Scan) -> DataSet:
    """Returns a data set, read; what the user expects counts more than what files say."""
    request = _completed(request, scan)
    watches = [WatchedValues(_of_file(path, request), request.measured) for path in request.paths]
    jobs = zip(request.paths, watches, strict=True)
    files = scan.each(_read_one, jobs, files=lambda job: [job[0]], lost=_lost)
    return DataSet(tuple(files), request)


def _read_one(one: tuple[Path, WatchedValues], scan: Scan) -> DataFile:
    path, watch = one
    try:
        return read_file(path, watch, scan)
    except SourceError as error:
        return DataFile(str(path), "unknown", error=error)
    except OSError as error:
        refused = SourceError(
            f"it cannot be read: {error.strerror}", where=str(path), do="Check its permissions."
        )
        return DataFile(str(path), "unknown", error=refused)


def _lost(job: tuple[Path, WatchedValues], error: SourceError) -> DataFile:
    return DataFile(str(job[0]), "unknown", error=error)


def _completed(request: Request, scan: Scan) -> Request:
    own, flags = request.expected, scan.expected
    expected = Expected(
        label_key=flags.label_key or own.label_key,
        classes=flags.classes if flags.classes is not None else own.classes,
        groups={**own.groups, **flags.groups},
        group_key=flags.group_key or own.group_key,
        vocabulary=flags.vocabulary if flags.vocabulary is not None else own.vocabulary,
        ignored=tuple(dict.fromkeys((*flags.ignored, *own.ignored))),
    )
    folders = {path.parent for path in request.paths}
    named = named_beside(folders.pop()) if len(folders) == 1 else Named()
    if (
        not named.classes
        and len(request.paths) == 1
        and request.paths[0].suffix.lower() == ".parquet"
    ):
        found = scan.each(_inside, request.paths, files=lambda path: [path], lost=_nameless)
        named = replace(next(found), vocabulary=named.vocabulary)
    if named.classes and request.named is None:
        request = replace(request, named=named.classes, names=named.file)
    return replace(request, expected=with_names(expected, named))


def _of_file(path: Path, request: Request) -> Expected:
    """Returns what is expected of one file: of one data set where its name says which."""
    expected = request.expected
    if expected.classes is not None or not expected.groups:
        return expected
    if len(expected.groups) == 1:
        return replace(expected, classes=next(iter(expected.groups.values())))
    return replace(expected, classes=max(expected.groups.values()))


def _inside(path: Path, scan: Scan) -> Named:
    """Returns the classes that a Parquet file names in its own description."""
    import json

    try:
        import polars as pl
    except ModuleNotFoundError:
        return Named()
    try:
        with scan.at_hand(path) as here:
            described = pl.read_parquet_metadata(here).get("huggingface", "")
        found = class_label(json.loads(described)["info"]["features"])
    except (Exception, pl.exceptions.PanicException):  # noqa: BLE001 - reported when the file is read
        return Named()
    return Named() if found is None else Named(found[1], found[0], str(path))


def _nameless(_path: Path, _error: SourceError) -> Named:
    """Returns that a file names no classes; why it cannot be read is reported when it is read."""
    return Named()


def _alone(paths: Iterable[Path]) -> Iterator[Request]:
    """Yields files that no request names: by folder, with what lies beside them."""
    by_folder: dict[Path, list[Path]] = {}
    for path in paths:
        if path.is_dir():
            yield from _folder(path)
        else:
            by_folder.setdefault(path.parent, []).append(path)
    for folder, files in by_folder.items():
        left = {path.resolve(): path for path in files}
        for request in (*_beside(folder), *_beside(folder.parent)):
            mine = tuple(p for one in request.paths if (p := left.pop(one.resolve(), None)))
            if mine:
                yield replace(request, paths=mine, missing=())
        if left:
            yield Request(tuple(left.values()), Expected())


def _folder(path: Path) -> Iterator[Request]:
    """Yields the parts of a data set that was saved as a folder."""
    parts = (
        [path]
        if (path / "state.json").is_file()
        else sorted(part for part in path.iterdir() if (part / "state.json").is_file())
    )
    for part in parts:
        files = tuple(sorted(file for file in part.iterdir() if file.suffix in ENDINGS))
        files = tuple(file for file in files if file.suffix == ".arrow")
        yield Request(files, Expected()) if files else Request((), Expected(), config=str(part))


def _beside(folder: Path) -> Iterator[Request]:
    """Yields what configurations in a folder say about data."""
    from nanguard.check.config.document import read_document
    from nanguard.check.config.run_config import read_project
    from nanguard.source.text import CONFIG_LIMIT, Text, decode, read_bytes

    found = sorted(path for path in folder.iterdir() if path.suffix.lower() in _CONFIGS)
    for path in found[:MAX_BESIDE]:
        try:
            decoded = decode(str(path), read_bytes(str(path), CONFIG_LIMIT), python=False)
            document = read_document(Text(str(path), decoded.content))
            runs = read_project([document])
        except (OSError, ValueError, SourceError):
            continue
        for run in runs:
            yield from from_config(run)
        if not runs:
            yield from from_document(document)
