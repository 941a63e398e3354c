"""Opens logs: which files are logs, which belong together, and what they say."""

from __future__ import annotations

import re
from contextlib import ExitStack
from enum import Enum
from typing import TYPE_CHECKING

from nanguard.check.log.binary_logs import MAGIC, is_events, read_events, read_wandb
from nanguard.check.log.grammar import (
    DECODING,
    NOT_UTF8,
    damage_of,
    line_of,
    loads,
    marked,
    unmarked,
)
from nanguard.check.log.quantities import Quantity, word_set
from nanguard.check.log.series import MOST_NOTES, BadLine, Gathering, Log, Note
from nanguard.check.log.table_logs import columns_of, is_history, read_csv, read_history
from nanguard.check.log.text_log import TextReader, read_text, stretches_of
from nanguard.errors import SourceError
from nanguard.record import METRICS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import Any

    from nanguard.check.scan import Scan


class Form(str, Enum):
    """The forms of logs."""

    TEXT = "text"
    CSV = "csv"
    HISTORY = "history"
    EVENTS = "tensorboard events"
    WANDB = "wandb"
    RECORD = "events of a guarded run"


# Files whose text may speak of losses and is no log.
_OTHERS = word_set(
    ".py .pyi .pyw .ipynb .md .rst .tex .bib .html .htm .xml .yaml .yml .toml .ini .cfg .conf "
    ".sh .bash .bat .ps1 .js .ts .c .cc .cpp .cu .h .hpp .java .rs .go .rb .lua .css .svg "
    ".lock .diff .patch .sql .r .m .jl .proto .cmake .mk"
)
_PLAIN = frozenset((".log", ".out", ".err", ".stdout", ".stderr"))
_OF_DATA = word_set(
    "text label labels input_ids prompt completion response instruction messages target image "
    "tokens sentence question answer"
)


_HOLES = re.compile(rb"\0{64,}")
_CODE = re.compile(r"^ *(?:import \w|from [\w.]+ import |def \w+\(|class \w+[(:])", re.MULTILINE)


def form_of(path: Path, head: bytes) -> Form | None:
    """Returns which form of log a file is; None if it is no log.

    Args:
        path: The file; its ending is a hint.
        head: How it begins.
    """
    if head.startswith(MAGIC) or (path.suffix.lower() == ".wandb" and not head):
        return Form.WANDB
    if is_events(path.name, head):
        return Form.EVENTS
    text = _decoded(head)
    ending = path.suffix.lower()
    if text is None or not text.strip() or ending in _OTHERS:
        return None
    if ending not in _PLAIN and len(_CODE.findall(text)) > 1:
        return None
    return _form_of_text(text, ending, whole=len(head) < 1 << 16)


def _form_of_text(text: str, ending: str, *, whole: bool) -> Form | None:
    begin = text.lstrip("\ufeff \t\r\n")
    is_utf8 = NOT_UTF8 not in begin.split("\n", 1)[0]
    text, begin = text.replace(NOT_UTF8, ""), begin.replace(NOT_UTF8, "")
    if ending == ".json" or begin.startswith("["):
        if is_history(begin):
            return Form.HISTORY
        first = begin.split("\n", 1)[0]
        # What is no UTF-8 is no JSON, whatever it looks like once it was decoded.
        if ending == ".json" and not (is_utf8 and isinstance(loads(first), dict)):
            return None
    if begin.startswith("{"):
        return _of_records(begin)
    if _is_csv(begin):
        return Form.CSV
    if ending in (".csv", ".tsv"):
        return None
    return Form.TEXT if _is_text(text, whole=whole, named=ending in _PLAIN) else None


def _is_csv(text: str) -> bool:
    found = columns_of(text.split("\n", 1)[0].rstrip("\r"))
    return found is not None and _has_numbers(text, found[0], len(found[1]))


def _decoded(head: bytes) -> str | None:
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return head[: len(head) // 2 * 2].decode("utf-16", "replace")
    # A machine that went down, or a rotated file, leaves stretches of zeros between lines.
    head = _HOLES.sub(b"", head)
    if head.count(b"\0") > len(head) // 100:
        return None
    text = head.decode("utf-8", DECODING)
    return text if text.count(NOT_UTF8) <= len(text) // 20 else None


def _of_records(text: str) -> Form | None:
    """Returns the form of a text that begins with an object."""
    records = [loads(line) for line in text.split("\n")[:20] if line.strip().startswith("{")]
    objects: list[dict[str, Any]] = [record for record in records if isinstance(record, dict)]
    if not objects:
        # The lines of a Python dictionary, as the Hugging Face trainer prints them.
        return Form.TEXT if text.startswith("{'") and _is_text(text, whole=True) else None
    if any(str(record.get("code", "")).startswith("RUN") for record in objects):
        return Form.RECORD
    if any(_OF_DATA & set(record) for record in objects):
        return None
    for record in objects:
        line = line_of(record)
        nulls = [name for name, value in record.items() if value is None]
        metrics = len(line.values) + len([name for name in nulls if "loss" in name])
        if metrics and (line.step or line.epoch or metrics > 1):
            return Form.TEXT
    return None


def _has_numbers(text: str, separator: str, columns: int) -> bool:
    rows = text.split("\n")[1:4]
    return any(len(row.split(separator)) == columns and any(map(str.isdigit, row)) for row in rows)


def _is_text(text: str, *, whole: bool, named: bool = False) -> bool:
    """Returns whether a text has lines of a log; the end of a long preamble is not waited for."""
    log = _read_sample(text if whole else text[: text.rfind("\n") + 1] or text)
    longest = max(
        (
            len(series)
            for series in log.series
            if series.role in (Quantity.LOSS, Quantity.GRAD_NORM, Quantity.SCALE)
        ),
        default=0,
    )
    return longest > 1 or bool(log.notes) or (named and (longest > 0 or not whole))


def _read_sample(text: str) -> Log:
    gathering = Gathering("")
    reader = TextReader(gathering)
    for stretch in stretches_of(text):
        reader.read(stretch)
    return gathering.log


LOG_HEAD_BYTES = 1 << 16
_ROLES = {
    "non-finite-loss": Quantity.LOSS,
    "non-finite-gradient": Quantity.GRAD_NORM,
    "falling-loss-scale": Quantity.SCALE,
}
_READERS = {
    Form.TEXT: read_text,
    Form.CSV: read_csv,
    Form.HISTORY: read_history,
    Form.WANDB: read_wandb,
}


def recognises(path: Path, head: bytes) -> bool:
    """Returns whether a file is a log.

    Args:
        path: The file; its ending is a hint.
        head: Its first 64 KiB.
    """
    return form_of(path, head) is not None


def recognises_folder(path: Path) -> bool:
    """Returns whether a folder is one log: event files of TensorBoard and nothing else."""
    try:
        inside = [file for file in path.iterdir() if not file.name.startswith(".")]
        return bool(inside) and all(
            file.is_file() and form_of(file, _head(file)) is Form.EVENTS for file in inside
        )
    except OSError:
        return False


def open_sources(paths: Sequence[Path], scan: Scan) -> Iterator[Log]:
    """Yields a log for each run among files and folders of logs.

    Event files in one folder are one log, and so are the metrics and events of a guarded run. A
    log that cannot be read has a ``problem``, and holds what could be read before it.
    """
    runs: dict[Path, list[Path]] = {}
    records: dict[Path, Path] = {}
    single: list[tuple[Path, Form]] = []
    for path in dict.fromkeys(paths):
        if path.is_dir():
            runs.setdefault(path, []).extend(file for file in path.iterdir() if file.is_file())
            continue
        form = form_of(path, _head(path))
        if form is Form.EVENTS:
            runs.setdefault(path.parent, []).append(path)
        elif form is Form.RECORD:
            records[path.parent] = path
        else:
            single.append((path, form or Form.TEXT))
    jobs = []
    for path, form in single:
        event_file = records.pop(path.parent, None) if path.name == METRICS else None
        jobs.append((path, form, event_file))
    yield from scan.each(_read_one, jobs, files=lambda job: [job[0]], lost=_lost)
    for path in records.values():
        yield _with_events(Log(str(path)), path)
    events = [(folder, tuple(sorted(set(files)))) for folder, files in runs.items()]
    yield from scan.each(_read_run, events, files=lambda run: run[1], lost=_lost_run)


def _read_one(job: tuple[Path, Form, Path | None], scan: Scan) -> Log:
    path, form, event_file = job
    try:
        with scan.at_hand(path) as here:
            log = _READERS[form](here, scan)
        log.path = str(path)
    except (OSError, SourceError) as error:
        return Log(str(path), problem=_problem(path, error))
    return log if event_file is None else _with_events(log, event_file)


def _lost(job: tuple[Path, Form, Path | None], error: SourceError) -> Log:
    return Log(str(job[0]), problem=error)


def _lost_run(run: tuple[Path, tuple[Path, ...]], error: SourceError) -> Log:
    return Log(_name_of(*run), problem=error)


def _name_of(folder: Path, files: tuple[Path, ...]) -> str:
    return str(files[0]) if len(files) == 1 else str(folder)


def _read_run(run: tuple[Path, tuple[Path, ...]], scan: Scan) -> Log:
    folder, files = run
    name = _name_of(folder, files)
    try:
        with ExitStack() as stack:
            here = [stack.enter_context(scan.at_hand(file)) for file in files]
            return read_events(here, name, scan)
    except (OSError, SourceError) as error:
        return Log(name, problem=_problem(folder, error))


def _with_events(log: Log, path: Path) -> Log:
    """Adds what the guard wrote down as bad to a log."""
    try:
        with path.open(encoding="utf-8", errors=DECODING) as file:
            for number, text in enumerate(iter(lambda: file.readline(LOG_HEAD_BYTES), ""), 1):
                damage = damage_of(marked(text), records=True, only_records=True)
                # A last line without an end may still be being written.
                if damage and text.endswith("\n"):
                    log.add_bad_lines([BadLine(number, damage, str(path))])
                record = loads(unmarked(marked(text)))
                role = _ROLES.get(str(record.get("name"))) if isinstance(record, dict) else None
                if role is None or len(log.notes) >= MOST_NOTES:
                    continue
                step = record.get("step")
                said = str(record.get("message", ""))[:160]
                log.notes.append(Note(role, said, step if isinstance(step, int) else None, number))
    except OSError as error:
        log.problem = _problem(path, error)
    return log


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(LOG_HEAD_BYTES)
    except OSError:
        return b""


def _problem(path: Path, error: OSError | SourceError) -> SourceError:
    if isinstance(error, SourceError):
        return error
    return SourceError(
        f"the log cannot be read ({error.strerror or error}).",
        where=str(path),
        do="Check that the file still exists and that this user may read it.",
    )
