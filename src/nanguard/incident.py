"""An incident: one bad step, from its capture to the page about it, and its folder on disk.

The folder is complete or not there. What is read may come from a stranger: nothing in it is run.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypedDict

from nanguard.errors import IncidentError
from nanguard.masking import hidden_tree
from nanguard.run_folder import make_private, open_private

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SCHEMA = "nanguard.incident/1"
NAME = "incident.json"
# The variable that keeps batches of training data out of incidents; second runs have to know, too.
NO_BATCH = "NANGUARD_NO_BATCH"
# A larger file was not written by us.
_LIMIT = 16 << 20


class ActionTaken(TypedDict):
    """What was done about the step, and why."""

    taken: str
    reason: str


class CauseFound(TypedDict):
    """Why a step was bad: a code, a sentence with the value, and how sure that is (0 to 1)."""

    code: str
    summary: str
    confidence: float


class Replayed(TypedDict, total=False):
    """How a step was replayed, and what that showed."""

    verdict: str
    method: str | None
    why: str | None
    seconds: float
    more: str
    second_run: str | None
    noticed_at: int


class RunFacts(TypedDict, total=False):
    """The run a step belongs to: what a replay has to know, and what a reader wants to."""

    command: list[str]
    folder: str
    signature: str | None
    ordinal: int
    skipped: list[int]
    seconds: float
    step_seconds: float | None
    ranks: int
    python: str
    torch: str
    nanguard: str
    platform: str
    device: str
    left_out: list[tuple[Any, ...]]


@dataclass(init=False, eq=False)
class Incident(Mapping[str, Any]):
    """A bad step, or a bad number of an evaluation.

    Whoever makes one sets attributes. Whoever reads one that may be a stranger's reads it as the
    mapping that its file holds, in which any field may be missing or strange. Fields that were set
    are written, in the order in which they were set; fields that this version does not know are
    kept as they are. A field whose type is wrong is one of these, or an error where nothing could
    be said without it.

    Args:
        known: Fields, as a file has them.
        folder: Where it was read from.

    Attributes:
        step: The step, counted from 0 for its optimizer.
        rank: The rank.
        symptom: What was seen.
        action: What was done about it.
        run: The run it belongs to.
        replay: How it was replayed, and what that showed.
        by_script: Whether the script raised, exited or passed the step over by itself.
        guard: What a ``Guard`` knows of it.
        origin: Where the first bad value was made; None if that is not known.
        cause: Why.
        other_causes: The runners-up.
        sentence: What happened, in one sentence.
        evidence: The numbers behind the cause.
        drift: The learned quantity that has moved far away from what it was.
        path: The way of the bad value, operation by operation.
        samples: Which samples of the batch are at fault; none if all, or if that is not known.
        dataset_indices: Where these samples are in the data set.
        fixes: What would repair it, verified ones first.
        trials: Everything that was tried.
        loop: The line that calls ``backward``.
        batch_size: How many samples the batch has.
        autocast: The type autocast computed in.
        optimizer: Its name, learning rate and eps.
        losses_before: Losses of the steps before.
        notes: What else is worth knowing.
        times: How often the fault was met, if more than once.
        again: The later steps with it.
        bad_items: The places in the data set of all samples that it was met with.
        unknown: Fields of other versions, and fields whose type is wrong.
        folder: Where it was read from; not part of the file.
    """

    step: int = 0
    rank: int = 0
    symptom: dict[str, Any] = field(default_factory=dict)
    action: ActionTaken | None = None
    run: RunFacts = field(default_factory=RunFacts)
    replay: Replayed = field(default_factory=Replayed)
    by_script: bool | None = None
    guard: dict[str, Any] | None = None
    origin: dict[str, Any] | None = None
    cause: CauseFound | None = None
    other_causes: list[CauseFound] = field(default_factory=list)
    sentence: str | None = None
    evidence: list[dict[str, Any]] = field(default_factory=list)
    drift: dict[str, Any] | None = None
    path: list[dict[str, Any]] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    dataset_indices: list[int] = field(default_factory=list)
    fixes: list[dict[str, Any]] = field(default_factory=list)
    trials: list[dict[str, Any]] = field(default_factory=list)
    loop: dict[str, Any] | None = None
    batch_size: int | None = None
    autocast: str | None = None
    optimizer: dict[str, Any] | None = None
    losses_before: list[Any] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    times: int | None = None
    again: list[dict[str, Any]] = field(default_factory=list)
    bad_items: list[int] = field(default_factory=list)
    unknown: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None

    def __init__(
        self, known: Mapping[str, Any] | None = None, *, folder: Path | None = None
    ) -> None:
        for one in fields(self):
            empty = one.default if one.default_factory is MISSING else one.default_factory()
            self.__dict__[one.name] = empty
        self.__dict__["folder"] = folder
        # Keys in the order of the file; what only has its default is not in it.
        self.__dict__["_keys"] = {"schema": None}
        self.put(known or {})

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in _TYPES:
            self.__dict__["_keys"][name] = None
            self.unknown.pop(name, None)

    def __getitem__(self, key: str) -> Any:
        if key not in self.__dict__["_keys"]:
            raise KeyError(key)
        if key == "schema":
            return SCHEMA
        return self.unknown[key] if key in self.unknown else getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dict__["_keys"])

    def __len__(self) -> int:
        return len(self.__dict__["_keys"])

    def put(self, known: Mapping[str, Any]) -> None:
        """Sets fields as a file has them; those that this version does not know are kept."""
        for key, value in known.items():
            kind = _TYPES.get(key)
            right = key in _MAY_BE_NULL if value is None else kind is not None and _is(value, kind)
            if right:
                setattr(self, key, value)
            elif key != "schema":
                self.unknown[key] = value
                self.__dict__["_keys"][key] = None

    def copy(self) -> Incident:
        """Returns another one with the same fields, of which each can be set anew."""
        return Incident(self, folder=self.folder)

    def to_json(self) -> dict[str, Any]:
        """Returns the incident as its file holds it, before numbers are made JSON's."""
        return dict(self)

    def without_secrets(self) -> Incident:
        """Returns the same without keys and passwords, wherever in it they stand."""
        return Incident(hidden_tree(self.to_json()), folder=self.folder)

    @classmethod
    def from_json(cls, content: Any, where: str = NAME) -> Incident:
        """Returns the incident that a file holds.

        Args:
            content: What the JSON holds.
            where: The file, for errors.

        Raises:
            IncidentError: It is not one that this version can read.
        """
        schema = content.get("schema") if isinstance(content, dict) else None
        if not isinstance(schema, str) or schema.rpartition("/")[0] != SCHEMA.rpartition("/")[0]:
            raise IncidentError(
                f"this is not an incident: its schema is {str(schema)[:80]!r}.",
                where=where,
                do=f"Give a folder that holds an {NAME} of schema {SCHEMA}.",
            )
        if schema != SCHEMA:
            raise IncidentError(
                f"the incident has the schema {schema[:80]!r}; this version reads {SCHEMA!r}.",
                where=where,
                do="Read it with the version of nanguard that wrote it, or a newer one.",
            )
        for key in _NEEDED:
            value, kind = content.get(key), _TYPES[key]
            if value is not None and not isinstance(value, kind):
                raise IncidentError(
                    f"the field {key!r} holds {type(value).__name__}, not {kind.__name__}.",
                    where=where,
                    do="The file was changed after it was written; run the command again.",
                )
        return cls(content)


# The type of each field in JSON. Nothing can be said about an incident in which one of those that
# are needed has another.
_TYPES: dict[str, type] = {
    "step": int,
    "rank": int,
    "symptom": dict,
    "action": dict,
    "run": dict,
    "replay": dict,
    "by_script": bool,
    "guard": dict,
    "origin": dict,
    "cause": dict,
    "other_causes": list,
    "sentence": str,
    "evidence": list,
    "drift": dict,
    "path": list,
    "samples": list,
    "dataset_indices": list,
    "fixes": list,
    "trials": list,
    "loop": dict,
    "batch_size": int,
    "autocast": str,
    "optimizer": dict,
    "losses_before": list,
    "notes": list,
    "times": int,
    "again": list,
    "bad_items": list,
}
_NEEDED = (
    "step",
    "rank",
    "sentence",
    "symptom",
    "origin",
    "cause",
    "evidence",
    "samples",
    "fixes",
    "replay",
)
_MAY_BE_NULL = frozenset(
    one.name for one in fields(Incident) if one.default is None and one.name in _TYPES
)


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def new_folder(incidents: Path, step: int, rank: int) -> Path:
    """Makes the folder for an incident; another of the same step gets a number at its end."""
    name = f"step-{step:06d}-rank{rank}"
    for number in range(1, 10000):
        folder = incidents / (name if number == 1 else f"{name}-{number}")
        try:
            make_private(incidents)
            make_private(folder, exist_ok=False)
        except FileExistsError:
            continue
        return folder
    raise IncidentError(
        f"there are thousands of incidents of step {step} already.",
        where=str(incidents),
        do="Give an empty folder: nanguard run --incidents DIR -- ...",
    )


def write(folder: Path, incident: Incident) -> None:
    """Writes an incident; a reader sees the old one or the new one, and nothing in between.

    Keys and passwords are hidden, wherever in it they stand.
    """
    make_private(folder)
    path = folder / NAME
    draft = folder / f".{NAME}.{os.getpid()}"
    content = hidden_tree(_plain(incident.to_json()))
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    with open_private(draft) as file:
        # The name of a file may hold half of a character, which JSON can only write as an escape.
        file.write(f"{text}\n".encode("utf-8", "backslashreplace"))
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def read(path: Path) -> Incident:
    """Reads an incident from its folder or from ``incident.json``.

    Raises:
        IncidentError: If it is not one that this version can read.
    """
    file = path / NAME if path.is_dir() else path
    try:
        # A device or a pipe would never end.
        if not stat.S_ISREG(file.stat().st_mode):
            raise IncidentError(
                f"{file.name} is not a file.",
                where=str(file),
                do="Give the folder of an incident, such as .nanguard/runs/NAME/step-000007-rank0.",
            )
        with file.open("rb") as opened:
            content = opened.read(_LIMIT + 1)
        if len(content) > _LIMIT:
            raise IncidentError(
                f"{file.name} is larger than {_LIMIT >> 20} MiB, which no incident is.",
                where=str(file),
                do="Look whether this is the file you meant.",
            )
        found = json.loads(content.decode("utf-8"))
    except OSError as error:
        raise IncidentError(
            f"there is no incident to read: {error.strerror}.",
            where=str(file),
            do="Give the folder of an incident, such as .nanguard/runs/NAME/step-000007-rank0.",
        ) from error
    except (ValueError, RecursionError) as error:
        raise IncidentError(
            f"{file.name} is not complete JSON ({error}).",
            where=str(file),
            do="The file was damaged after it was written; run the command again for a new one.",
        ) from error
    incident = Incident.from_json(found, str(file))
    incident.folder = file.parent
    return incident


def newest_first(folder: Path) -> list[Path]:
    """Returns the incidents that runs have left below a folder, the newest first."""
    found = [path for path in (folder / ".nanguard").glob(f"**/{NAME}") if path.is_file()]
    return sorted(found, key=lambda path: -path.stat().st_mtime)


def _plain(value: Any) -> Any:
    """Returns a value that JSON can hold; non-finite numbers become their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value
