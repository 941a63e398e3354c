"""Which reader a data file needs, and which files and folders are data to train on."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from nanguard.check.checkpoint.safetensors import tensor_names
from nanguard.check.data.columns import GROUPS, LABELS, TOKENS, plain_name
from nanguard.check.data.dataset import DataFile, NeedsCodeError
from nanguard.check.paths import is_called_a_configuration
from nanguard.errors import SourceError, installing

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from nanguard.check.data.dataset import WatchedValues
    from nanguard.check.scan import Scan

JSON_LINES, CSV, PARQUET, ARROW, ARRAYS, JSON = (
    "JSON lines",
    "CSV",
    "Parquet",
    "Arrow",
    "arrays",
    "JSON",
)
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
ENDINGS = {
    ".jsonl": JSON_LINES,
    ".ndjson": JSON_LINES,
    ".jsonlines": JSON_LINES,
    ".csv": CSV,
    ".tsv": CSV,
    ".parquet": PARQUET,
    ".pq": PARQUET,
    ".arrow": ARROW,
    ".feather": ARROW,
    ".npy": ARRAYS,
    ".npz": ARRAYS,
    ".safetensors": ARRAYS,
    ".json": JSON,
}


def format_of(path: Path, head: bytes) -> str | None:
    """Returns the format of a file; None if it is none that can be read."""
    by_name = ENDINGS.get(path.suffix.lower())
    if head.startswith(b"PAR1"):
        return PARQUET
    if head.startswith(b"ARROW1") or (head.startswith(b"\xff\xff\xff\xff") and by_name == ARROW):
        return ARROW
    if head.startswith(b"\x93NUMPY") or (head.startswith(b"PK\x03\x04") and b".npy" in head):
        return ARRAYS
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    if by_name == JSON:
        return JSON if start == b"[" else JSON_LINES if _objects(head) else None
    if by_name is None and start == b"{" and _objects(head):
        return JSON_LINES
    return by_name


def read_file(path: Path, watch: WatchedValues, scan: Scan) -> DataFile:
    """Returns a data file, read; one that cannot be read says why."""
    with scan.at_hand(path) as here:
        out = _read_here(here, watch, scan)
    out.path = str(path)
    return out


def _read_here(path: Path, watch: WatchedValues, scan: Scan) -> DataFile:
    with path.open("rb") as file:
        head = file.read(1 << 16)
    kind = format_of(path, head)
    out = DataFile(str(path), kind or "unknown")
    if head.startswith(LFS_POINTER):
        # Nothing is wrong with it: it has not been fetched here.
        what = "it is a pointer of Git LFS, not the data itself"
        out.error = SourceError(what, where=str(path), do="git lfs pull brings the data.")
        return out
    out.broken = _stand_in(head)
    if not head or out.broken:
        return out
    try:
        _read(path, watch, scan, out)
    except NeedsCodeError as error:
        out.error = error
    except SourceError as error:
        out.broken = error.what
    except ModuleNotFoundError as error:
        out.error = SourceError(
            f"{error.name} is not installed",
            where=str(path),
            do=f"Install it: {installing('scan')}",
        )
    except BaseException as error:  # a panic inside of polars is no Exception; all else goes on
        if not _is_polars(error):
            raise
        words = str(error).splitlines() if isinstance(error, Exception) else []
        out.broken = f"it cannot be read as {kind}" + "".join(f": {w[:200]}" for w in words[:1])
    return out


def _read(path: Path, watch: WatchedValues, scan: Scan, out: DataFile) -> None:
    if out.format == JSON_LINES:
        from nanguard.check.data.records import read_jsonl as read
    elif out.format == CSV:
        from nanguard.check.data.table_files import read_delimited as read
    elif out.format == PARQUET:
        from nanguard.check.data.table_files import read_parquet as read
    elif out.format == ARROW:
        from nanguard.check.data.table_files import read_arrow as read
    elif out.format == ARRAYS:
        from nanguard.check.data.arrays import read_arrays as read
    elif out.format == JSON:
        from nanguard.check.data.records import read_json_list as read
    else:
        raise SourceError("it is no data file", where=str(path), do="Leave it out.")
    out.ledger, out.roles = read(path, watch, scan)


def _stand_in(head: bytes) -> str | None:
    """Returns what a file is that was to be data and is something in its place."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "it is UTF-16, which no reader of data expects; save it as UTF-8"
    return None


def _is_polars(error: BaseException) -> bool:
    import polars as pl

    return isinstance(error, (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError))


def _objects(head: bytes) -> bool:
    """Returns whether the first lines are JSON objects, one in each; a single one is a setting."""
    lines = [line for line in head.splitlines()[:3] if line.strip()]
    return (
        len(lines) > 1
        and all(line.strip().startswith(b"{") for line in lines)
        and (lines[0].rstrip().endswith(b"}"))
    )


_PROGRESS_WORDS = "step steps epoch epochs iter iteration iterations global_step it batch update"
_PROGRESS = frozenset(_PROGRESS_WORDS.split())
_METRIC = re.compile(
    r"(?:^|[_/. ])(?:loss|lr|learning_rate|grad_norm|gradnorm|acc|accuracy|ppl|perplexity|scale|"
    r"loss_scale|throughput|tokens_per_sec|f1|auc|mae|rmse|bleu|val_acc|reward_mean|elapsed)"
    r"(?:$|[_/. ])",
    re.IGNORECASE,
)
_EVENT_WORDS = "event level msg logger levelname asctime severity schema kind_of"
_EVENT = frozenset(_EVENT_WORDS.split())
_CONTENT_WORDS = (
    "text texts image images image_path img path file file_name filename audio audio_path "
    "caption prompt completion response messages conversations conversation instruction "
    "question answer sentence sentence1 sentence2 premise hypothesis query document content "
    "output input chosen rejected tokens words title abstract src tgt source features "
    "embedding x pixel_values context passage"
)
_CONTENT = frozenset(_CONTENT_WORDS.split())
_INPUTS_WORDS = (
    "x inputs input features feature images image data pixel_values embeddings embedding "
    "attention_mask token_type_ids position_ids mask weights_per_sample"
)
_INPUTS = frozenset(_INPUTS_WORDS.split())
_LOGS = re.compile(r"log|metric|loss|history|event|progress|result|report|stat|curve", re.I)


def recognises(path: Path, head: bytes) -> bool:
    """Returns whether a file is data to train on.

    Args:
        path: The file.
        head: Its first bytes, 64 KiB of them.
    """
    kind = format_of(path, head)
    if kind is None or path.name in ("trainer_state.json", "dataset_info.json", "state.json"):
        return False
    if not head.strip():
        return path.suffix.lower() != ".json" and not _LOGS.search(path.stem)
    if head.startswith(LFS_POINTER):
        return path.suffix.lower() not in (".json", ".safetensors")
    if kind == JSON_LINES:
        return _json_lines(head, path)
    if kind == CSV:
        return _csv(head)
    if kind == JSON:
        return _json_list(head)
    if kind == ARRAYS and path.suffix.lower() == ".safetensors":
        return holds_data(tensor_names(head))
    return True


def recognises_folder(path: Path) -> bool:
    """Returns whether a folder is one data set as ``save_to_disk`` of datasets writes it."""
    if (path / "dataset_dict.json").is_file():
        return True
    return (path / "state.json").is_file() and (path / "dataset_info.json").is_file()


def holds_data(names: Iterable[str]) -> bool:
    """Returns whether tensors of these names are a data set rather than a model."""
    plain = [plain_name(name) for name in names if name]
    if not plain or any("." in name for name in names):
        return False
    named = [name in LABELS or name in TOKENS for name in plain]
    known = [yes or name in _INPUTS for yes, name in zip(named, plain, strict=True)]
    return any(named) and all(known)


def _json_lines(head: bytes, path: Path) -> bool:
    if path.suffix.lower() == ".json" and is_called_a_configuration(path.name):
        return False  # with something behind its end, which no reader of settings takes
    keys: list[set[str]] = []
    for line in head.splitlines()[:20]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            keys.append(set(value))
    if not keys:
        return path.suffix.lower() in (".jsonl", ".ndjson") and b"{" in head
    return _is_data(set().union(*keys), path)


def _is_data(keys: set[str], path: Path | None = None) -> bool:
    plain = {plain_name(key) for key in keys}
    named = plain & {*LABELS, *TOKENS, *GROUPS, *_CONTENT}
    metrics = [key for key in keys if _METRIC.search(key)]
    if metrics and ({key.lower() for key in keys} & _PROGRESS or len(metrics) * 2 > len(keys)):
        return bool(plain & {*LABELS, *TOKENS} - {"tokens"})
    if keys & _EVENT and not plain & {*LABELS, *TOKENS}:
        return False
    return bool(named) or path is None or not _LOGS.search(path.stem)


def _csv(head: bytes) -> bool:
    from nanguard.check.data.table_files import layout_of

    return _is_data(set(layout_of(head).names))


def _json_list(head: bytes) -> bool:
    text = head.decode("utf-8-sig", "replace").lstrip()
    try:
        value, _ = json.JSONDecoder().raw_decode(text, text.find("{"))
    except (ValueError, RecursionError):
        return False
    if not isinstance(value, dict) or text[1:].lstrip()[:1] != "{":
        return False
    plain = {plain_name(key) for key in value}
    return bool(plain & {*LABELS, *TOKENS, *_CONTENT}) and _is_data(set(value))
