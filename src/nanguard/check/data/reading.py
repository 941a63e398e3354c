"""Data sets from files: the way in for everything that checks data."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nanguard.check.data.dataset import DataFile, DataSet, Request
from nanguard.check.data.formats import ENDINGS, read_file
from nanguard.check.data.naming import Named, class_label, named_beside, with_names
from nanguard.check.data.pointing import from_config, from_document
from nanguard.check.data.recognition import recognises, recognises_folder
from nanguard.check.data.watching import Watch
from nanguard.check.scanning import Expected
from nanguard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from nanguard.check.scanning import Scan

__all__ = [
    "from_config",
    "from_document",
    "open_sources",
    "read_request",
    "recognises",
    "recognises_folder",
]

MAX_BESIDE = 20  # configurations in a folder that are asked about the data in it
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
    watches = [Watch(_of_file(path, request), request.measured) for path in request.paths]
    jobs = zip(request.paths, watches, strict=True)
    files = scan.each(_read_one, jobs, files=lambda job: [job[0]], lost=_lost)
    return DataSet(tuple(files), request)


def _read_one(one: tuple[Path, Watch], scan: Scan) -> DataFile:
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


def _lost(job: tuple[Path, Watch], error: SourceError) -> DataFile:
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
    except (Exception, pl.exceptions.PanicException):  # noqa: BLE001 - told when the file is read
        return Named()
    return Named() if found is None else Named(found[1], found[0], str(path))


def _nameless(_path: Path, _error: SourceError) -> Named:
    """Returns that a file names no classes; why it cannot be read is told when it is read."""
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
    from nanguard.check.config.run import read_project
    from nanguard.source.files import CONFIG_LIMIT, decode, read_bytes
    from nanguard.source.text import Text

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
