"""Tells logs from everything else, by what they hold."""

from __future__ import annotations

import re
from enum import Enum
from typing import TYPE_CHECKING

from nanguard.check.log.csv_log import columns_of
from nanguard.check.log.events import is_events
from nanguard.check.log.gathering import Gathering
from nanguard.check.log.history import is_history
from nanguard.check.log.lines import stretches_of
from nanguard.check.log.names import Role, word_set
from nanguard.check.log.records import line_of, loads
from nanguard.check.log.text import TextReader
from nanguard.check.log.wandb import MAGIC

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from nanguard.check.log.series import Log


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
    if ending == ".json" or begin.startswith("["):
        if is_history(begin):
            return Form.HISTORY
        first = begin.split("\n", 1)[0]
        # What is no UTF-8 is no JSON, whatever it looks like once it was decoded.
        if ending == ".json" and ("\ufffd" in first or not isinstance(loads(first), dict)):
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
    text = head.decode("utf-8", "replace")
    return text if text.count("\ufffd") <= len(text) // 20 else None


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
    log = _read(text if whole else text[: text.rfind("\n") + 1] or text)
    longest = max(
        (
            len(series)
            for series in log.series
            if series.role in (Role.LOSS, Role.GRAD_NORM, Role.SCALE)
        ),
        default=0,
    )
    return longest > 1 or bool(log.notes) or (named and (longest > 0 or not whole))


def _read(text: str) -> Log:
    gathering = Gathering("")
    reader = TextReader(gathering)
    for stretch in stretches_of(text):
        reader.read(stretch)
    return gathering.log
