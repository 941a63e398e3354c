"""What the names of files and folders say: which step, which run, which part of a whole."""

from __future__ import annotations

import re

_STEP = re.compile(r"(?:global_?)?(?:step|iter(?:ation)?|it)s?[-_=. ]?(\d+)", re.IGNORECASE)
_EPOCH = re.compile(
    r"(?<![a-z])(?:checkpoint|ckpt|chkpt|epoch|ep|e|snapshot)s?[-_=. ]?(\d+)", re.IGNORECASE
)
_NUMBER = re.compile(r"(?:^|[-_=. ])(\d+)(?=$|[-_=. ])")
_FOLDER = re.compile(
    r"(?:tmp[-_])?(?:checkpoint|ckpt|chkpt|global_?step|step|epoch|iter(?:ation)?|it|ep|snapshot)s?"
    r"[-_=.]?\d+(?:\D.*)?|\d{3,}",
    re.IGNORECASE,
)
# Numbers behind these words count something else than steps.
_OTHER = re.compile(
    r"(?:shard|rank|part|fold|seed|mp|pp|tp|dp|ep|stage|layer|layers|v|ver|version|size|of|expert"
    r"|worker|split|chunk|lora|r|rng|state|states|gpu|device|group|task|sampler|custom"
    r"|optimizer|scheduler|head|block|width|depth|dim|bs|batch)[-_=. ]?\d+$",
    re.IGNORECASE,
)
_SHARD = re.compile(r"(.+?)-(\d{5})-of-(\d{5})\.(safetensors|bin|pt|pth)")
_DIGITS = re.compile(r"\d+(?:\.\d+)?")
_LAST = frozenset({"last", "latest", "final", "current", "model", "pytorch_model", "adapter_model"})


def step_in(name: str) -> int | None:
    """Returns the step or epoch that a name says; None if it says none."""
    found = _STEP.findall(name) or _EPOCH.findall(name)
    if found:
        return int(found[-1][:18])
    stem = name.split(".")[0] or name
    for match in reversed(list(_NUMBER.finditer(stem))):
        if not _OTHER.search(stem[: match.end(1)]):
            return int(match[1][:18])
    return None


def is_step_folder(name: str) -> bool:
    """Returns whether a folder's name is that of one checkpoint of a run."""
    return _FOLDER.fullmatch(name) is not None


def is_leftover(name: str) -> bool:
    """Returns whether a folder's name is that of a checkpoint that is still being written."""
    return name.lower().startswith(("tmp-", "tmp_", "."))


def template(name: str) -> str:
    """Returns a name without its numbers, which checkpoints of one run have in common."""
    return _DIGITS.sub("#", name)


def shard_of(name: str) -> tuple[str, int, int] | None:
    """Returns the whole a file is a part of, which part it is, and how many there are."""
    match = _SHARD.fullmatch(name)
    return None if match is None else (match[1], int(match[2]), int(match[3]))


def is_last(name: str) -> bool:
    """Returns whether a name is that of the newest checkpoint of a run."""
    return name.split(".")[0].lower() in _LAST
