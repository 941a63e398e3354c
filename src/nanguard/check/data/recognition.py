"""Which files and folders are data to train on, told by what they hold."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from nanguard.check.data.arrays import tensor_names
from nanguard.check.data.formats import ARRAYS, CSV, JSON, JSON_LINES, LFS_POINTER, format_of
from nanguard.check.data.roles import GROUPS, LABELS, TOKENS, plain_name

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

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
        return holds_data(tensor_names(head) or [])
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
    told = [name in LABELS or name in TOKENS for name in plain]
    known = [yes or name in _INPUTS for yes, name in zip(told, plain, strict=True)]
    return any(told) and all(known)


def _json_lines(head: bytes, path: Path) -> bool:
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
    told = plain & {*LABELS, *TOKENS, *GROUPS, *_CONTENT}
    metrics = [key for key in keys if _METRIC.search(key)]
    if metrics and ({key.lower() for key in keys} & _PROGRESS or len(metrics) * 2 > len(keys)):
        return bool(plain & {*LABELS, *TOKENS} - {"tokens"})
    if keys & _EVENT and not plain & {*LABELS, *TOKENS}:
        return False
    return bool(told) or path is None or not _LOGS.search(path.stem)


def _csv(head: bytes) -> bool:
    from nanguard.check.data.delimited import layout_of

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
