"""The formats' own readers: what they refuse, ``nanguard check`` must not call clean."""

from __future__ import annotations

import ast
import io
import json
import pickletools
import re
import struct
import sys
import warnings
import zlib
from typing import TYPE_CHECKING

from nanguard.check.log.binary_logs import fields_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def refusal(kind: str, path: Path) -> str | None:
    """Returns why the reader of a format refuses a file; None if it reads it.

    Args:
        kind: The kind of the file.
        path: The file.
    """
    reader = READERS.get(kind)
    if reader is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader(path)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - a panic in a library is no Exception
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


def _torch(path: Path) -> None:
    import torch

    try:
        torch.load(path, map_location="cpu", weights_only=True)
    except RuntimeError as error:
        if "TorchScript archives" in str(error):
            torch.jit.load(str(path), map_location="cpu")
        elif "Invalid magic number" not in str(error) or not _is_one_pickle(path):
            raise


def _is_one_pickle(path: Path) -> bool:
    """Returns whether a file is what ``pickle.dump`` writes, which need not be torch's."""
    with path.open("rb") as file:
        try:
            for _ in pickletools.genops(file):
                pass
        except ValueError:
            return False
        return not file.read(1)


def _safetensors(path: Path) -> None:
    import safetensors

    safetensors.deserialize(path.read_bytes())  # type: ignore[no-untyped-call]


def _parquet(path: Path) -> None:
    import polars

    polars.read_parquet(path)


def _arrow(path: Path) -> None:
    import polars

    data = path.read_bytes()
    if data.startswith(b"ARROW1"):
        polars.read_ipc(io.BytesIO(data))
    else:
        polars.read_ipc_stream(io.BytesIO(data))


def _numpy(path: Path) -> None:
    import numpy

    found = numpy.load(path, allow_pickle=False)
    if isinstance(found, numpy.lib.npyio.NpzFile):
        with found:
            for name in found.files:
                found[name]


def _json(path: Path) -> None:
    json.loads(path.read_bytes())


_COMMENT_OR_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_LAST_COMMA = re.compile(r'("(?:[^"\\]|\\.)*")|,(?=\s*[}\]])')


def _json_config(path: Path) -> None:
    """Reads JSON with comments and commas behind the last value, as people write configurations."""
    data = path.read_bytes()
    text = data.decode(json.detect_encoding(data))
    text = _COMMENT_OR_TEXT.sub(lambda at: at[0] if at[0].startswith('"') else " ", text)
    json.loads(_LAST_COMMA.sub(lambda at: at[1] or "", text))


def _json_lines(path: Path) -> None:
    for line in path.read_bytes().split(b"\n"):
        if line.strip():
            json.loads(line)


def _yaml(path: Path) -> None:
    """Makes the values as well, but for those with tags that some library has to know."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        pass

    def unknown(loader: Loader, tag: str, node: yaml.Node) -> None:
        if tag.startswith("tag:yaml.org,2002:") and "python/" not in tag:
            loader.construct_undefined(node)

    Loader.add_multi_constructor("", unknown)
    for document in yaml.load_all(path.read_bytes(), Loader=Loader):
        del document


def _toml(path: Path) -> None:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    tomllib.loads(path.read_bytes().decode("utf-8"))


def _python(path: Path) -> None:
    ast.parse(path.read_bytes())


def _tensorboard(path: Path) -> None:
    """Reads records with their checksums; a last one that is cut off is still being written."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

    reader = PyRecordReader_New(str(path))
    while True:
        try:
            reader.GetNext()
        except Exception as error:
            if "truncated" in str(error).lower() or type(error).__name__ == "OutOfRangeError":
                return
            raise
        Event.FromString(reader.record())


def _wandb(path: Path) -> None:
    """Reads records with their checksums, and what they say of history as W&B itself does."""
    from wandb.proto.wandb_internal_pb2 import HistoryRecord  # type: ignore[attr-defined]

    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        checksum, size, kind = struct.unpack_from("<IHB", data, at)
        body = data[at + 7 : at + 7 + size]
        if kind == 0 or len(body) < size:
            return  # padding, or a record that is still being written
        if kind > 4 or zlib.crc32(data[at + 6 : at + 7 + size]) != checksum:
            raise ValueError(f"the record at {at} is damaged")
        record = body if kind in (1, 2) else record + body
        if kind in (1, 4):
            for field, value in fields_of(record):
                if field == 2 and isinstance(value, bytes):
                    HistoryRecord.FromString(value)
        at += 7 + size


# Logs of lines have no reader of their own: a line that is no JSON belongs into a log.
READERS: dict[str, Callable[[Path], None]] = {
    "torch": _torch,
    "torch-legacy": _torch,
    "safetensors": _safetensors,
    "index": _json,
    "parquet": _parquet,
    "arrow": _arrow,
    "npy": _numpy,
    "npz": _numpy,
    "json-config": _json_config,
    "json-data": _json,
    "jsonl": _json_lines,
    "trainer-state": _json,
    "yaml": _yaml,
    "toml": _toml,
    "python": _python,
    "notebook": _json,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
}
