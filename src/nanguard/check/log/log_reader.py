"""Opens logs: which files are logs, which belong together, and what they and tables say."""

from __future__ import annotations

import csv
import os
import re
from contextlib import ExitStack
from enum import Enum
from functools import partial
from itertools import chain
from typing import IO, TYPE_CHECKING, Any

from nanguard.check.log.binary_logs import MAGIC, is_events, read_events, read_wandb
from nanguard.check.log.grammar import (
    DECODING,
    HAS_ZEROS,
    LONGEST_LINE,
    NOT_IN_UTF8,
    NOT_UTF8,
    VALUE,
    ZEROS,
    LoggedValue,
    LogLine,
    damage_of,
    line_of,
    loads,
    marked,
    number_of,
    unmarked,
)
from nanguard.check.log.quantities import METRIC_ROLES, Metric, Quantity, metric_of, word_set
from nanguard.check.log.series import (
    MOST_NOTES,
    BadLine,
    Gathering,
    Log,
    LogRows,
    Note,
    SeriesColumn,
)
from nanguard.check.log.text_log import TextReader, add_loose, read_text, stretches_of
from nanguard.errors import SourceError
from nanguard.record import METRICS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path
    from typing import Any

    from nanguard.check.scan import Scan

_ROWS_AT_ONCE = 20_000
# Bytes between two reports of progress.
_PROGRESS_BYTES = 1 << 20
_NO_NAME = re.compile(r"[:={}]")
_MOST_COLUMNS = 2000


def columns_of(header: str) -> tuple[str, list[Metric | None]] | None:
    """Returns the separator and the columns of a header; None if it is none of a log."""
    header = marked(header).replace(ZEROS, "").replace(NOT_UTF8, "")
    for separator in ",\t;":
        try:
            names = next(csv.reader([header], delimiter=separator), [])
        except csv.Error:
            continue
        if not 2 <= len(names) <= _MOST_COLUMNS:
            continue
        if any(_NO_NAME.search(name) or VALUE.fullmatch(name.strip()) for name in names):
            continue
        columns = [metric_of(name) for name in names]
        roles = {metric.role for metric in columns if metric}
        placed = roles & {Quantity.STEP, Quantity.EPOCH, Quantity.BATCH}
        if roles & {Quantity.LOSS, Quantity.GRAD_NORM, Quantity.SCALE} and (
            placed or len(roles) > 1
        ):
            return separator, columns
    return None


def read_csv(path: Path, scan: Scan) -> Log:
    """Returns what a CSV log says.

    Raises:
        OSError: It cannot be read.
    """
    gathering = Gathering(str(path))
    gathering.log.sparse = True
    with path.open(encoding="utf-8-sig", errors=DECODING, newline="") as file:
        left = os.fstat(file.fileno()).st_size
        header = file.readline(LONGEST_LINE)
        found = columns_of(header)
        if found is None:
            return gathering.log
        lines = _csv_lines(file, left - len(header), partial(scan.progress, str(path)))
        gather_rows(gathering, chain([header], lines), 1, *found)
    return gathering.log


def gather_rows(
    gathering: Gathering,
    lines: Iterable[str],
    first: int,
    separator: str,
    columns: list[Metric | None],
) -> None:
    """Adds the rows of a table to a log.

    Args:
        gathering: What makes the log.
        lines: The lines, each with its end, marks of damage included.
        first: The number of the first one.
        separator: What stands between two cells.
        columns: What each column is.
    """
    cleaned = _Cleaned(lines, first)
    loose: dict[tuple[object, ...], LogRows] = {}
    bad: list[BadLine] = []
    reader = csv.reader(cleaned, delimiter=separator)
    for count, (cells, damage) in enumerate(_rows(reader), 1):
        number = first + reader.line_num - 1
        add_loose(loose, number, row_of(columns, cells))
        # A last line without an end may still be being written.
        if not damage and cells and len(cells) != len(columns) and cleaned.ended:
            damage = f"the row has not {len(columns)} cells, as the header has"
        if damage:
            bad.append(BadLine(number, damage))
        if count % _ROWS_AT_ONCE == 0:
            gathering.add(list(loose.values()), bad=bad)
            loose, bad = {}, []
    gathering.add(list(loose.values()), bad=[*bad, *cleaned.bad])


class _Cleaned:
    """Lines without the marks of damage.

    Attributes:
        bad: The lines that had marks.
        ended: Whether the last line has an end.
    """

    def __init__(self, lines: Iterable[str], first: int) -> None:
        self._lines = enumerate(lines, first)
        self.bad: list[BadLine] = []
        self.ended = True

    def __iter__(self) -> Iterator[str]:
        for number, line in self._lines:
            self.ended = line.endswith("\n")
            text = marked(line)
            if ZEROS in text or NOT_UTF8 in text:
                self.bad.append(BadLine(number, HAS_ZEROS if ZEROS in text else NOT_IN_UTF8))
                text = unmarked(text)
            yield text


def _csv_lines(file: IO[str], left: int, progress: Callable[[int], None]) -> Iterator[str]:
    """Yields lines, the endless ones cut short, as far as the file reached when it was opened."""
    seen = 0
    while left > 0 and (line := file.readline(LONGEST_LINE)):
        left -= len(line)
        seen += len(line)
        if seen > _PROGRESS_BYTES:
            progress(seen)
            seen = 0
        if line.endswith("\n") or len(line) < LONGEST_LINE:
            yield line
            continue
        yield line[:1000] + "\n"
        while (more := file.readline(LONGEST_LINE)) and not more.endswith("\n"):
            left -= len(more)
    progress(seen)


def _rows(reader: Iterator[list[str]]) -> Iterator[tuple[list[str], str]]:
    """Yields rows, and what is wrong with them."""
    while True:
        try:
            yield next(reader), ""
        except StopIteration:
            return
        except csv.Error as error:
            yield [], f"the row is not CSV ({error})"


def row_of(columns: list[Metric | None], cells: list[str]) -> LogLine:
    """Returns what a row says."""
    line = LogLine()
    # A header that stands in the middle of the file, after a restart, holds no numbers.
    for metric, cell in zip(columns, cells, strict=False):
        text = cell.strip() if metric else ""
        if metric is None or not text or len(text) > 40:
            continue
        percent = text.endswith("%")
        text = text.removesuffix("%").strip()
        if not VALUE.fullmatch(text):
            continue
        number = number_of(text) / (100 if percent else 1)
        _put(line, LoggedValue(metric, number, 0, 0))
    return line


def _put(line: LogLine, value: LoggedValue) -> None:
    role = value.metric.role
    if role in METRIC_ROLES:
        line.values.append(value)
    elif value.number - value.number != 0:
        return
    elif role is Quantity.STEP or (role is Quantity.BATCH and line.step is None):
        line.step = value
    elif role is Quantity.EPOCH:
        line.epoch = value
    elif role is Quantity.RANK:
        line.rank = int(value.number)


_HISTORY_BYTES = 256 << 20
_FIRST = re.compile(r"\s*\[\s*(\{[^{}\[\]]*\})")
_COLUMN = re.compile(r'"([^"]{1,60})"\s*:\s*\[\s*(?:[-+]?[\d.]|NaN|-?Infinity|null)')


def is_history(head: str) -> bool:
    """Returns whether a JSON text is a history, by its beginning."""
    if re.search(r'"log_history"\s*:\s*\[', head):
        return True
    first = _FIRST.match(head)
    if first:
        record = loads(first[1])
        line = line_of(record) if isinstance(record, dict) else None
        return bool(line and _losses(line.values) and (line.step or line.epoch))
    columns = [metric_of(name) for name in _COLUMN.findall(head)]
    losses = [metric for metric in columns if metric and metric.role is Quantity.LOSS]
    return len(losses) > 0 and len([metric for metric in columns if metric]) > 1


def _losses(values: list[Any]) -> bool:
    return any(
        value.metric.role in (Quantity.LOSS, Quantity.GRAD_NORM, Quantity.SCALE) for value in values
    )


def read_history(path: Path, scan: Scan) -> Log:
    """Returns what a history says.

    Raises:
        OSError: It cannot be read.
        SourceError: It is cut short, or too large.
    """
    size = path.stat().st_size
    if size > _HISTORY_BYTES:
        raise SourceError(
            f"a history of {size / 2**20:.0f} MiB in one JSON text is not read.",
            where=str(path),
            do="Check the log that the run printed instead.",
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise SourceError(
            f"the history is not text in UTF-8 (byte {error.start + 1}).",
            where=str(path),
            do="It was damaged: take the file of another checkpoint.",
        ) from error
    scan.progress(str(path), size)
    records = _records(loads(text))
    if records is None:
        raise SourceError(
            "this is not a complete JSON text with a history.",
            where=str(path),
            do="It may be cut short: take the file of another checkpoint.",
        )
    return _gathered(str(path), text, records)


def _records(content: Any) -> list[dict[str, Any]] | None:
    if isinstance(content, dict) and "log_history" in content:
        content = content["log_history"]
    if isinstance(content, list):
        return [record for record in content if isinstance(record, dict)]
    if not isinstance(content, dict):
        return None
    columns = {name: column for name, column in content.items() if isinstance(column, list)}
    known = {name: metric for name in columns if (metric := metric_of(name))}
    rows = max((len(columns[name]) for name in known), default=0)
    placed = any(metric.role not in METRIC_ROLES for metric in known.values())
    return [
        {
            **({} if placed else {"epoch": row + 1}),
            **{name: columns[name][row] for name in known if row < len(columns[name])},
        }
        for row in range(rows)
    ]


def _gathered(path: str, text: str, records: list[dict[str, Any]]) -> Log:
    lines = _lines_of_records(text, len(records))
    gathering = Gathering(path)
    loose: dict[tuple[object, ...], LogRows] = {}
    for number, record in enumerate(records):
        add_loose(loose, lines[number] if lines else number + 1, line_of(record))
    gathering.add(list(loose.values()))
    if not lines:
        for series in gathering.log.series:
            series.lines = SeriesColumn()
    return gathering.log


def _lines_of_records(text: str, wanted: int) -> list[int]:
    """Returns the line on which each record has its place; none if they cannot be told apart."""
    begin = max(text.find('"log_history"'), 0)
    for name in ("step", "epoch", "iter", "iteration", "global_step"):
        found: list[int] = []
        line, at = 1, 0
        for match in re.finditer(rf'"{name}"\s*:\s*\d', text[begin:]):
            line += text.count("\n", at, begin + match.start())
            at = begin + match.start()
            found.append(line)
        if len(found) == wanted and len(set(found)) == len(found):
            return found
    return []


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
