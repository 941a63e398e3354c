"""What a run has met before: the same fault again is counted, and a bad sample is no instability.

A fault is known by the line and the operation that its first bad value came from. When a later step
goes bad in the same way, its incident is counted in the first one. A sample is known by its data
set and its place there, if it is the same whenever it is read: with a random augmentation it was
bad that one time. When a batch holds one that was found bad, its step is skipped, and the
ladder does not climb: nothing about the run is unstable. With a quarantine, loaders leave it out.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard import incident as incidents
from nanguard.errors import IncidentError
from nanguard.source.text import own_folder
from nanguard.view.report.words import sentence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from nanguard.incident import Incident
    from nanguard.replay.start import Start
    from nanguard.replay.starts import Starts

# The list of what was left out, below the folder that the command runs in.
QUARANTINE = Path(".nanguard", "quarantine.jsonl")
# Later steps of one fault that its incident lists one by one; all of them are counted.
_LISTED = 50
# A larger file was not written by us.
_LARGEST_FILE = 16 << 20
# Items that a line names one by one.
_NAMED = 5


@dataclass(frozen=True, order=True, slots=True)
class Item:
    """A sample of a data set.

    Attributes:
        dataset: The class of the data set.
        length: How many samples that has: two sets of one class are told apart by it.
        index: The sample's place there.
    """

    dataset: str
    length: int
    index: int


def _none(_places: set[int]) -> set[int]:
    return set()


@dataclass(frozen=True, slots=True)
class DrawnItems:
    """The samples of the last batches.

    Attributes:
        items: By their place in the data set of the loader that has handed them out.
        of_step: Those that the step was made of, as far as that is known.
        same_again: Reads samples once more; returns the places of those that are what they were.
    """

    items: dict[int, list[Item]] = field(default_factory=dict)
    of_step: set[Item] = field(default_factory=set)
    same_again: Callable[[set[int]], set[int]] = _none


def item_of(dataset: Any, index: int) -> Item:
    """Returns a sample as it is known later, and in other runs: by the set it really lies in."""
    while _is_subset(dataset):
        dataset, index = dataset.dataset, int(dataset.indices[index])
    try:
        length = len(dataset)
    except Exception:  # noqa: BLE001 - the script's own: streams say in many ways that they have none
        length = 0
    kind = type(dataset)
    return Item(f"{kind.__module__}.{kind.__qualname__}", length, int(index))


def _is_subset(dataset: Any) -> bool:
    """Returns whether a data set is torch's ``Subset``; the launcher knows no torch."""
    kinds = [(kind.__module__, kind.__name__) for kind in type(dataset).__mro__]
    return ("torch.utils.data.dataset", "Subset") in kinds


def items_drawn(starts: Starts, of: Sequence[Start]) -> DrawnItems:
    """Returns the samples of the last batches, by their place in the loader's own data set.

    Loaders look ahead, and a step may take several batches.

    Args:
        starts: What knows the last batches.
        of: What the step began with; nothing where that is not known.
    """
    found: dict[int, list[Item]] = {}
    of_step: set[Item] = set()
    taken = _batches_of(starts, of)
    for place, (own, _batch, indices) in enumerate(starts.batches):
        for index in indices:
            item = item_of(own._dataset, index)
            found.setdefault(index, []).append(item)
            if place in taken:
                of_step.add(item)
    return DrawnItems(found, of_step, partial(_read_again, starts))


def _batches_of(starts: Starts, of: Sequence[Start]) -> list[int]:
    """Returns which batches a step was made of, by their places among the last ones.

    A loader that is ahead of its loop, as Accelerate's is, has handed them out before.
    """
    drawn = [batch for start in of for batch in (*start.drawn, *start.given)]
    every = [batch for _own, batch, _indices in starts.batches]
    places = [n for n, batch in enumerate(every) if any(batch is one for one in drawn)]
    if not places:
        return list(range(len(every)))
    if starts.is_opening:
        return places[: len(places) - starts.ahead]
    return [place - starts.ahead for place in places if place >= starts.ahead]


def _read_again(starts: Starts, places: set[int]) -> set[int]:
    from nanguard.replay.bad_data import same_again

    return same_again(list(starts.batches), places, starts.streams)


@dataclass(slots=True)
class Fault:
    """Something that went wrong, once or many times.

    Attributes:
        folder: Its incident.
        step: The step at which it was first met.
        traced: The line and the operation that made the first bad value.
        cause: The code of its cause.
        times: How often it was met.
        items: The samples that it was met with.
        again: Later steps, as the incident lists them.
    """

    folder: Path
    step: int
    traced: tuple[Any, ...] | None
    cause: str
    times: int = 1
    items: Counter[Item] = field(default_factory=Counter)
    again: list[dict[str, Any]] = field(default_factory=list)


class KnownFaults:
    """The faults of one process."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._faults: list[Fault] = []
        self._epoch: set[Item] = set()

    def __len__(self) -> int:
        return len(self._faults)

    @property
    def traced(self) -> list[tuple[Any, ...] | None]:
        """Where the known faults come from, in the order in which they were met."""
        return [fault.traced for fault in self._faults]

    def __getitem__(self, place: int) -> Fault:
        return self._faults[place]

    def add(self, fault: Fault, drawn: DrawnItems, found: Incident) -> list[Item]:
        """Remembers a fault that was explained.

        Args:
            fault: The fault.
            drawn: The samples of its step.
            found: Its incident.

        Returns:
            The samples that it was met with and that are another thing each time they are read.
        """
        fault.items.update(_bad_by_themselves(fault, drawn, found))
        self._faults.append(fault)
        lies_in_them = _lies_in_samples(fault.cause)
        return sorted(set(_at_fault(drawn, found)) - set(fault.items)) if lies_in_them else []

    def bad_items(self, drawn: DrawnItems) -> list[Item]:
        """Returns those samples that are known to be bad."""
        return sorted(drawn.of_step & {item for fault in self._faults for item in fault.items})

    def fault_of(self, items: Sequence[Item]) -> Fault | None:
        """Returns the fault that samples are known for."""
        found = (fault for fault in self._faults if any(item in fault.items for item in items))
        return next(found, None)

    @property
    def lower_rate_helps(self) -> bool:
        """Whether a lower learning rate may help against what was met last."""
        return not self._faults or _is_helped_by_lower_rate(self._faults[-1].cause)

    def count(self, fault: Fault, step: int, found: Incident, drawn: DrawnItems) -> None:
        """Counts another step of a fault, in its incident; the folder of that step goes.

        Args:
            fault: The fault.
            step: The step.
            found: What was seen of it, as an incident.
            drawn: The samples of the step.
        """
        fault.times += 1
        items = _bad_by_themselves(fault, drawn, found) or self.bad_items(drawn)
        met_before = [item for item in items if fault.items[item]]
        fault.items.update(items)
        entry: dict[str, Any] = {"step": step, "symptom": found.get("symptom")}
        if found.get("samples"):
            entry["samples"] = found["samples"]
        named = _at_fault(drawn, found) or items
        if named:
            entry["dataset_indices"] = [item.index for item in named]
        fault.again = [*fault.again, entry][:_LISTED]
        self._write(fault)
        if not met_before:
            if fault.times & (fault.times - 1):
                return  # 2, 4, 8, ... times: a run that goes down this way has enough to say
            self._say(f"step {step}: the same as at step {fault.step} ({fault.times} times so far)")
        else:
            self._tell_once_an_epoch(fault, step, met_before, set(items) - set(met_before))

    def _tell_once_an_epoch(
        self, fault: Fault, step: int, items: list[Item], new: set[Item]
    ) -> None:
        """Says which samples are skipped; a sample that comes again begins another epoch."""
        if self._epoch & set(items):
            self._epoch.clear()
        first = not self._epoch
        self._epoch.update(items)
        if first:
            known = [(item, times) for item, times in fault.items.most_common() if item not in new]
            listed = ", ".join(
                f"{item.index} ({times} times)" if times > 1 else str(item.index)
                for item, times in known[:_NAMED]
            )
            more = len(known) - _NAMED
            rest = f" and {more} more" if more > 0 else ""
            self._say(
                f"step {step}: skipped: dataset item {listed}{rest}, known to be bad since step "
                f"{fault.step}; {fault.times} bad steps so far"
            )

    def culprit(self) -> str:
        """Returns what went wrong most often, in a sentence; empty if nothing was explained."""
        fault = max(self._faults, key=lambda fault: fault.times, default=None)
        if fault is None:
            return ""
        try:
            said = sentence(incidents.read(fault.folder))
        except IncidentError:
            return ""
        times = f" ({fault.times} times)" if fault.times > 1 else ""
        return f"{said}{times}" if said else ""

    @staticmethod
    def _write(fault: Fault) -> None:
        with contextlib.suppress(IncidentError, OSError):
            found = incidents.read(fault.folder)
            found.times, found.again = fault.times, fault.again
            if fault.items:
                found.bad_items = sorted({item.index for item in fault.items})
            incidents.write(fault.folder, found)


def discard(folder: Path) -> None:
    """Removes the folder of an incident that is counted in another."""
    shutil.rmtree(folder, ignore_errors=True)


def _at_fault(drawn: DrawnItems, found: Incident) -> list[Item]:
    """Returns the samples of a step that its incident names."""
    return sorted({item for place in found.dataset_indices for item in drawn.items.get(place, ())})


def _bad_by_themselves(fault: Fault, drawn: DrawnItems, found: Incident) -> list[Item]:
    """Returns those samples of a step that its fault lies in, and will lie in the next time."""
    if not _lies_in_samples(fault.cause):
        return []
    blamed = {
        place: items
        for place in found.dataset_indices
        if (items := drawn.items.get(place)) is not None
    }
    known = {place for place, items in blamed.items() if set(items) <= set(fault.items)}
    certain = known | drawn.same_again(set(blamed) - known) if set(blamed) - known else known
    return sorted({item for place in certain for item in blamed[place]})


@cache
def _causes() -> dict[str, tuple[bool, bool]]:
    from nanguard.diagnose.cause import all_causes

    return {cause.code: (cause.lower_rate_helps, cause.lies_in_samples) for cause in all_causes()}


def _is_helped_by_lower_rate(code: str) -> bool:
    return _causes().get(code, (True, False))[0]


def _lies_in_samples(code: str) -> bool:
    return _causes().get(code, (True, False))[1]


class Quarantine:
    """Samples that loaders leave out, and the list of them on disk.

    Attributes:
        left_out: The samples.
    """

    def __init__(
        self, folder: Path, *, several_ranks: bool, known: Iterable[Item] | None = None
    ) -> None:
        self._file = folder / QUARANTINE
        self._several_ranks = several_ranks
        self.left_out = set(read_quarantine(folder) if known is None else known)

    def add(self, fault: Fault) -> list[Item]:
        """Leaves the samples of a fault out from now on; returns those that are new."""
        new = sorted(set(fault.items) - self.left_out)
        self.left_out.update(new)
        said = ""
        with contextlib.suppress(IncidentError):
            said = sentence(incidents.read(fault.folder))
        lines = [
            {
                "dataset": item.dataset,
                "length": item.length,
                "index": item.index,
                "step": fault.step,
                "cause": fault.cause,
                "sentence": said,
                "incident": str(fault.folder),
                "time": round(time.time(), 3),
            }
            for item in new
        ]
        if lines:
            with contextlib.suppress(OSError):  # the run is worth more than the list
                own_folder(self._file.parent)
                with self._file.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(line) + "\n" for line in lines)
        return new

    def without_bad(self, dataset: Any, indices: Any) -> Any:
        """Returns what a loader may take for a batch; None if nothing of it is left.

        Args:
            dataset: Its data set.
            indices: The samples that it has chosen: a list of places, or one.
        """
        if not self.left_out:
            return indices
        if type(indices) is int and not self._several_ranks:
            return None if item_of(dataset, indices) in self.left_out else indices
        if not isinstance(indices, list) or not set(map(type, indices)) <= {int}:
            return indices
        kept = [index for index in indices if item_of(dataset, index) not in self.left_out]
        if kept or not indices:
            return kept
        # With several ranks, one that had a batch less than the others would leave them waiting.
        return indices if self._several_ranks else None


def read_quarantine(folder: Path) -> list[Item]:
    """Returns the samples that earlier runs in a folder have found bad."""
    path = folder / QUARANTINE
    try:
        if path.stat().st_size > _LARGEST_FILE:
            return []
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found: list[Item] = []
    for line in lines:
        with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):
            entry = json.loads(line)
            found.append(Item(str(entry["dataset"]), int(entry["length"]), int(entry["index"])))
    return found
