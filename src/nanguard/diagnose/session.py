"""Explains an incident: replays the step, finds the origin, tries causes and repairs."""

from __future__ import annotations

import contextlib
import hashlib
import linecache
import math
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard import incident as incidents
from nanguard.diagnose import lab
from nanguard.diagnose.cause import (
    STATISTICS,
    Case,
    all_causes,
    drift_behind,
    last_return,
    sets_rate_at,
)
from nanguard.diagnose.lab import Lab, Usual
from nanguard.diagnose.repairs import inside_a_library
from nanguard.diagnose.sentence import sentence, users_site
from nanguard.findings import name_of
from nanguard.replay.task import Task
from nanguard.source.edits import SourceFile, addressed, changed_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nanguard.diagnose.cause import Cause, Suspicion
    from nanguard.diagnose.lab import Budget, Replayer, Trial
    from nanguard.diagnose.repairs import Repair
    from nanguard.incident import Incident, Replayed
    from nanguard.replay.task import Facts, ReplayOutcome
    from nanguard.replay.tracer.origin import Origin
    from nanguard.replay.tracer.sites import Site

# Lines of source above and below the origin that an incident keeps.
_AROUND = 4
_TRIED_CAUSES = 4
_TRIED_REPAIRS = 4
# Steps that are made with a repair, to see whether it lasts.
_FURTHER = 2
# What rounding may change in a loss: an eps that is added, or another order of operations.
_ROUNDING = 1e-2
# From here on a change is no repair: the run goes on with something else to learn.
_UPSETTING = 0.25
_SMALLEST_SCALAR_BATCH = 2
# What a report calls proven begins at 0.9: a cause that nothing showed stays below.
_UNPROVEN = 0.89
_PROVEN = 0.9
# What a change to the line that made the step a good one is worth, and what is left of a cause if
# its changes left the step bad.
_REPAIRED = 0.95
_REFUTED = 0.7
# The verdicts of replays that came to the bad step.
_SHOWN = ("reproduced", "low-precision-only")
_LARGEST_SEARCH = 64
# What was bad before the step, or the part of it that is replayed, began.
_HANDED_ON = ("input", "parameter", "buffer")


def explain(message: dict[str, Any], replayer: Replayer) -> None:
    """Completes an incident on disk.

    Args:
        message: The incident as it was written, where it is, and which step to replay. Which
            faults are known already may be there, too; if this is one of them, ``same_as`` is its
            place among them afterwards, and nothing is written. ``note`` is called before each
            replay, with the seconds that it may take.
        replayer: Makes replays.
    """
    folder = Path(message["folder"])
    began = time.monotonic()
    lab = Lab(
        replayer,
        Task(
            message["target"],
            folder=str(folder),
            skipped=message.get("skipped", ()),
        ),
        _budget(message),
    )
    before: Incident = message["incident"]
    explanation = Explanation(lab, message["method"], message.get("known", ()))
    found = explanation.complete(before.copy(), only_known=message.get("only_known", False))
    message["traced"], message["same_as"] = explanation.traced, explanation.same_as
    if explanation.same_as is not None or found.cause is None:
        message["found"] = found
        return
    known = 0.0 if before.cause is None else before.cause.get("confidence", 0.0)
    better = found.cause["confidence"] >= known or _goes_further(found, before)
    shown = found.replay["verdict"] in _SHOWN and better and not _falls_behind(found, before)
    if known and not shown:
        # What is known already is more than this has shown.
        why, found = found.replay.get("why"), before.copy()
        found.replay = {**before.replay, "second_run": why}
    found.replay["seconds"] = round(time.monotonic() - began, 2)
    if message["method"] == "in-place" and _wants_second_run(found, replayer):
        found.replay["more"] = "second-run"
    incidents.write(folder, found)


def _goes_further(found: Incident, before: Incident) -> bool:
    """Returns whether what was found made the bad value that something else only handed on."""
    known, origin = before.origin or {}, found.origin or {}
    if known.get("op") not in _HANDED_ON or origin.get("op") in (None, *_HANDED_ON):
        return False
    return found.cause is not None and found.cause["code"] != "unknown"


def _falls_behind(found: Incident, before: Incident) -> bool:
    """Returns whether less is said of the same fault than before.

    A bad input was found only where the model computes with it, or a value that was made before
    the step without the name that it has there.
    """
    known, origin = before.origin or {}, found.origin or {}
    if found.cause is None or before.cause is None or found.cause["code"] != before.cause["code"]:
        return False
    if known.get("table") and found.cause["confidence"] <= before.cause["confidence"]:
        return True  # it says which value it is, too
    return known.get("op") == "input" and origin.get("phase") == "forward"


def _wants_second_run(found: Incident, replayer: Replayer) -> bool:
    """Returns whether going through the steps from the first line would show more."""
    origin = found.origin or {}
    proven = found.cause is not None and found.cause.get("confidence", 0.0) >= _PROVEN
    if origin.get("table"):
        return not proven  # what made it was seen already
    if origin.get("by_numpy"):
        return False  # torch sees no more of it from the first line on
    if origin.get("phase") == "init" or origin.get("op") in _HANDED_ON:
        return True
    code = "" if found.cause is None else found.cause.get("code")
    if code == "bad-initialization":
        return True  # what made the model has run long ago
    # An update alone does not show what a repair of a schedule would do.
    update = origin.get("phase") == "optimizer"
    return not proven and (replayer.wants_history or update or code == "unknown")


def _budget(message: dict[str, Any]) -> Budget:
    """Returns the time for an explanation; the process that waits for it can read how far it is."""
    seconds = lab.seconds_to_step(message["incident"], message["method"])
    note = message.get("note")
    if message.get("control"):
        name = lab.TRYING + Path(message["folder"]).name
        note = partial(lab.note_replay, Path(message["control"], name))
    return lab.Budget(lab.limits_for(seconds, lab.chosen_total()), note=note)


class Explanation:
    """Goes from a bad step to its origin, its cause, and what would repair it.

    Attributes:
        traced: The line and the operation that the trace shows, as others can be compared with it.
        same_as: The known fault that this is another case of; None if it is none.
    """

    def __init__(self, lab: Lab, method: str, known: Sequence[tuple[Any, ...] | None] = ()) -> None:
        self._lab = lab
        self._method = method
        self._known = list(known)
        self.traced: tuple[Any, ...] | None = None
        self.same_as: int | None = None

    def complete(self, incident: Incident, *, only_known: bool = False) -> Incident:
        """Returns an incident with everything that could be found out about it.

        Args:
            incident: The incident.
            only_known: Whether it is only looked whether the fault is a known one.
        """
        outcome = self._lab.trace()
        if outcome is not None and self._is_known(outcome):
            facts = outcome.facts
            incident.samples, incident.batch_size = facts.samples, facts.batch_size
            incident.dataset_indices = facts.indices
            return incident
        return incident if only_known else self._complete(incident, outcome)

    def _is_known(self, outcome: ReplayOutcome) -> bool:
        """Returns whether a fault is another case of one that is known."""
        self.traced = None if outcome.origin is None else _traced(outcome.origin)
        if self.traced is None or self.traced not in self._known:
            return False
        self.same_as = self._known.index(self.traced)
        return True

    def _complete(self, incident: Incident, outcome: ReplayOutcome | None) -> Incident:
        replay: Replayed = {"verdict": "not-replayed", "method": self._method}
        incident.replay = replay
        if outcome is None or outcome.error is not None:
            replay["why"] = "no answer within the time" if outcome is None else outcome.error
            if outcome is not None and outcome.differs:
                replay["verdict"] = "not-reproduced"
            return self._unknown(incident, "the step could not be replayed")
        if outcome.symptom is None:
            return self._not_reproduced(incident, replay)
        replay["verdict"] = "reproduced"
        if outcome.ordinal < incident.run["ordinal"]:
            replay["noticed_at"] = incident.step
            incident.symptom = {**outcome.symptom.to_json(), "noticed": incident.symptom}
        incident.step = outcome.step
        if outcome.origin is None:
            if outcome.facts.notes:
                incident.notes = outcome.facts.notes
            return self._unknown(incident, "the trace shows no operation that made the bad value")
        origin = self._with_detail(outcome, outcome.origin)
        origin = self._first_cause(outcome, origin)
        if outcome.facts.lr is not None and not math.isfinite(outcome.facts.lr):
            origin = replace(origin, site=_schedule(outcome.facts) or origin.site)
        case = Case(outcome, origin, self._lab)
        if case.loaded is not None and case.loaded.site is not None:
            case.origin = replace(origin, site=case.loaded.site)
        self._find_samples(case)
        self._describe(incident, case)
        self._diagnose(incident, case)
        if case.is_half and case.in_float32().finite:
            replay["verdict"] = "low-precision-only"
        incident.trials = [trial.to_json() for trial in self._lab.trials]
        return incident

    def _not_reproduced(self, incident: Incident, replay: Replayed) -> Incident:
        replay["verdict"] = "not-reproduced"
        if self._method == "second-run":
            # Running a command again is not what running it once was: that it went well is no
            # proof against the hardware.
            replay["why"] = "the step is finite in a second run, which may differ from the first"
            return self._unknown(incident, "the step was finite when the command ran again")
        if incident.run["ranks"] > 1 and incident.symptom["where"] != "loss":
            why = f"what rank {incident['rank']} adds to the step is finite: another rank was bad"
            return self._unknown(incident, why)
        incident.cause = {
            "code": "hardware-or-nondeterminism",
            "summary": "replays of the same step, from the same state, differ from each other: "
            "timing or hardware is to be suspected",
            "confidence": 0.7,
        }
        return incident

    def _unknown(self, incident: Incident, why: str) -> Incident:
        incident.cause = {"code": "unknown", "summary": why, "confidence": 0.0}
        empty: dict[str, Any] = {"origin": None, "samples": [], "fixes": []}
        incident.put({key: value for key, value in empty.items() if key not in incident})
        return incident

    def _with_detail(self, outcome: ReplayOutcome, origin: Origin) -> Origin:
        """Returns an origin with its numbers; on a device, a replay of its own reads them."""
        if origin.detail is not None or origin.op in (*_HANDED_ON, "aten.empty"):
            return origin
        if outcome.facts.came_in or origin.table is not None:
            return origin  # no operation of the step's
        closer = self._lab.trace(look_at=origin.index)
        if closer is None or closer.origin is None or closer.origin.detail is None:
            return origin
        if closer.facts.samples:
            outcome.facts.blame(closer.facts.samples)
        outcome.facts.path = closer.facts.path or outcome.facts.path
        return closer.origin

    def _first_cause(self, outcome: ReplayOutcome, origin: Origin) -> Origin:
        """Returns an earlier origin, if the step is finite once its bad values are replaced.

        A bad value may reach another operation through finite ones: softmax makes 0 of -inf.
        """
        for index, op in outcome.facts.suspects:
            trial = self._lab.try_out(
                f"the bad results of {op} (operation {index}) replaced", heal=(index,)
            )
            if trial.finite:
                earlier = self._lab.trace(look_at=index)
                if earlier is not None and earlier.origin is not None:
                    if earlier.facts.samples:
                        outcome.facts.blame(earlier.facts.samples)
                    outcome.facts.path = earlier.facts.path or outcome.facts.path
                    return earlier.origin
        return origin

    def _find_samples(self, case: Case) -> None:
        """Finds the sample at fault by halving, where the bad value is a single number."""
        detail, size = case.origin.detail, case.facts.batch_size
        if case.facts.samples or detail is None or not size or case.origin.table is not None:
            return
        # A statistic over the batch does not tell which of its samples has made it bad.
        if detail.output.count != 1 and case.op not in STATISTICS:
            return
        if case.phase != "forward" or not _SMALLEST_SCALAR_BATCH <= size <= _LARGEST_SEARCH:
            return
        rows = list(range(size))
        while len(rows) > 1 and not self._lab.out_of_time:
            half = rows[: len(rows) // 2]
            many = len(half) > 1
            listed = f"samples {half[0]} to {half[-1]}" if many else f"sample {half[0]}"
            trial = self._lab.try_out(f"{listed} replaced by a good one", without=tuple(half))
            if trial.finite is None:
                return
            rows = half if trial.finite else rows[len(rows) // 2 :]
        trial = self._lab.try_out(
            f"sample {rows[0]} of the batch replaced by a good one", without=tuple(rows)
        )
        if trial.finite:
            case.facts.blame(rows)

    def _describe(self, incident: Incident, case: Case) -> None:
        origin, facts = case.origin, case.facts
        incident.origin = {
            "phase": "init" if origin.table is not None else origin.phase,
            "op": origin.op,
            "kernel": origin.kernel,
            "module": origin.module,
            **_place(origin.site),
        }
        outer = None if origin.site is None else users_site(origin.site, origin.callers)
        if outer is not None:
            incident.origin["called_from"] = _place(outer)
        if origin.table is not None:
            incident.origin["table"] = origin.table
        if origin.by_numpy:
            incident.origin["by_numpy"] = True
        incident.samples = facts.samples
        incident.path = facts.path
        if facts.indices:
            incident.dataset_indices = facts.indices
        incident.loop = _place(facts.backward_site)
        incident.batch_size = facts.batch_size
        incident.autocast = facts.autocast
        incident.optimizer = {"name": facts.optimizer, "lr": facts.lr, "eps": facts.eps}
        incident.losses_before = facts.losses[-20:]
        if facts.notes:
            incident.notes = facts.notes

    def _diagnose(self, incident: Incident, case: Case) -> None:
        ranked = self._ranked(case)
        if not ranked:
            self._unknown(incident, f"{case.origin.op} made a bad value, for a reason not known")
            incident.evidence = [
                {"what": f"input {s.name} of {case.origin.kernel}", **s.to_json()}
                for s in case.inputs
            ]
            return
        (confidence, confirmed, cause, suspicion), *others = ranked
        incident.evidence = suspicion.evidence
        usual = Usual(case.facts.losses)
        repairs, refuted = self._repairs(cause, case)
        folder = incident.run.get("folder") or str(Path.cwd())
        incident.fixes = [fix_of(repair, usual, folder) for repair in repairs]
        helped = [repair for repair in repairs if _helped(repair, usual)]
        if any(repair.diff for repair in helped):
            confidence = max(confidence, _REPAIRED)
        elif self._only_far_off(case):
            confidence = min(confidence, _UNPROVEN)
        if not helped and not confirmed:
            confidence = min(confidence, _UNPROVEN)
            if refuted:
                confidence *= _REFUTED
        summary = cause.concluded(case, suspicion)
        incident.cause = {
            "code": cause.code,
            "summary": summary,
            "confidence": round(confidence, 2),
        }
        incident.sentence = sentence(case, cause.code, summary, folder)
        drift = drift_behind(case)
        if drift is not None:
            incident.drift = drift.to_json()
            incident.sentence = f"{incident.sentence}; {drift.in_words()}"
        incident.other_causes = [
            {"code": other.code, "summary": why.summary, "confidence": round(how, 2)}
            for how, _, other, why in others[:3]
        ]

    def _only_far_off(self, case: Case) -> bool:
        """Returns whether trials made the step finite, and none of them a good one."""
        finite = [trial for trial in self._lab.trials if trial.finite]
        return bool(finite) and not any(map(Usual(case.facts.losses).allows, finite))

    def _ranked(self, case: Case) -> list[tuple[float, bool, Cause, Suspicion]]:
        """Returns the causes that something speaks for, the likeliest first.

        Each has its confidence, and whether a trial has confirmed it. What nothing has confirmed
        stays below what a report calls proven.
        """
        found = [(cause, cause.suspect(case)) for cause in all_causes()]
        suspected = [(cause, suspicion) for cause, suspicion in found if suspicion is not None]
        suspected.sort(key=lambda pair: -pair[1].strength)
        usual = Usual(case.facts.losses)
        ranked = []
        for place, (cause, suspicion) in enumerate(suspected):
            trials = cause.trials(case) if place < _TRIED_CAUSES else []
            confidence = suspicion.strength
            confirmed = any(map(usual.allows, trials))
            if confirmed:
                confidence += (1 - confidence) * 0.7
            elif any(trial.finite is False for trial in trials):
                confidence *= 0.5
            ranked.append((confidence, confirmed, cause, suspicion))
        return sorted(ranked, key=lambda entry: -entry[0])

    def _repairs(self, cause: Cause, case: Case) -> tuple[list[Repair], bool]:
        """Returns the repairs of a cause, tried as far as there is time, the best ones first.

        Beside them stands whether a change was tried that should have helped, and did not.
        """
        usual = Usual(case.facts.losses)
        tried, refuted, texts = [], False, set()
        for place, repair in enumerate(cause.repairs(case) or inside_a_library(case)):
            if repair.source in texts:
                continue  # two ways to a repair have written the same
            if repair.source is not None:
                texts.add(repair.source)
            trial = repair.trial
            shows = self._method != "in-place" or not repair.acts_later
            if trial is None and repair.source is not None and place < _TRIED_REPAIRS and shows:
                path, text = repair.source
                trial = self._lab.try_out(repair.summary, source={path: text})
            if trial is not None and _failed(trial):
                refuted = refuted or (repair.diff is not None and trial.finite is False)
                continue  # it stays among the trials, but nobody should make this change
            repair = repair if trial is None else replace(repair, trial=trial)
            tried.append(self._compared(self._followed(repair, usual), usual))
        at_source = any(map(_is_at_source, tried))
        tried.sort(key=lambda repair: merit(repair, usual, at_source=at_source))
        return tried, refuted

    def _followed(self, repair: Repair, usual: Usual) -> Repair:
        """Returns a repair after some steps were made with it: one that helps has to last."""
        if repair.source is None or self._method != "in-place" or not _helped(repair, usual):
            return repair
        path, text = repair.source
        what = f"{repair.summary}; {_FURTHER} steps made with it"
        return replace(repair, later=self._lab.try_out(what, source={path: text}, further=_FURTHER))

    def _compared(self, repair: Repair, usual: Usual) -> Repair:
        """Returns a repair with what it makes of a good step, which it should leave as it is."""
        if repair.source is None or self._method != "in-place" or not _helped(repair, usual):
            return repair
        path, text = repair.source
        return replace(repair, on_good=self._lab.good_step_with(source={path: text}))


def _traced(origin: Origin) -> tuple[Any, ...] | None:
    """Returns where a bad value came from, as other steps can be compared with it."""
    site = origin.site
    return None if site is None else (site.file, site.line, origin.op, origin.phase)


def _failed(trial: Trial) -> bool:
    """Returns whether a change left the step bad, or broke its code."""
    return trial.finite is False or trial.crashed


def _helped(repair: Repair, usual: Usual) -> bool:
    """Returns whether a repair was tried, and made the step, and those after it, good ones."""
    if not usual.allows(repair.trial, exact=repair.exact) or _fades(repair, usual):
        return False
    return not _upsets_good(repair, usual)


def _upsets_good(repair: Repair, usual: Usual) -> bool:
    """Returns whether a repair makes other steps of good ones: the run would learn something else.

    A small loss is compared with the usual one, of which it is a part.
    """
    if repair.on_good is None:
        return False
    plain, changed = repair.on_good
    size = max(abs(plain), usual.loss if math.isfinite(usual.loss) else 0.0)
    return not abs(changed - plain) <= _UPSETTING * size


def _changes_good(repair: Repair) -> bool:
    """Returns whether a repair changes what good steps compute, by more than rounding does."""
    if repair.on_good is None:
        return False
    plain, changed = repair.on_good
    return not abs(changed - plain) <= _ROUNDING * max(abs(plain), abs(changed))


def _fades(repair: Repair, usual: Usual) -> bool:
    """Returns whether the run goes bad with a repair a few steps on."""
    later = repair.later
    if later is None or later.finite is None:
        return False
    return not usual.allows(later, exact=repair.exact)


def merit(repair: Repair, usual: Usual, *, at_source: bool) -> tuple[int, bool]:
    """Returns the place of a repair among others: the first helps and changes nothing else.

    Args:
        repair: The repair.
        usual: What is usual for the loss.
        at_source: Whether another repairs what this one may only hide.
    """
    if _helped(repair, usual):
        return (2 if repair.silences and at_source else 0), _changes_good(repair)
    if _is_at_source(repair):
        return 1, False
    return (3 if repair.trial is not None and repair.trial.finite else 4), False


def _is_at_source(repair: Repair) -> bool:
    """Returns whether a change repairs what could not be tried, as it lies before the step."""
    return repair.trial is None and repair.diff is not None and not repair.silences


def fix_of(repair: Repair, usual: Usual, folder: str) -> dict[str, Any]:
    """Returns a repair as an incident holds it.

    Args:
        repair: The repair.
        usual: What is usual for the loss.
        folder: Where the run was started, from where a diff names its file.
    """
    trial = repair.trial
    how = "not tried" if trial is None else trial.result
    if trial is not None and usual.is_far_from(trial, exact=repair.exact):
        how += f", far above the {name_of(usual.loss)} of the steps before"
    if repair.later is not None and repair.later.finite is not None:
        lasts = "still good" if not _fades(repair, usual) else f"bad again ({repair.later.result})"
        how += f"; {_FURTHER} steps on it is {lasts}"
    if repair.on_good is not None:
        how += f"; {_on_good_in_words(repair)}"
    summary = repair.summary
    if repair.silences:
        summary += f"; this silences it: {repair.silences}"
    out: dict[str, Any] = {
        "summary": summary,
        # A step that is finite and far off would ruin the weights all the same.
        "verified": _helped(repair, usual),
        "how": how,
    }
    if repair.silences:
        out["silences"] = True
    if repair.diff:
        out["diff"] = addressed(repair.diff, folder)
        path = changed_file(repair.diff)
        with contextlib.suppress(OSError):
            out["sha256"] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return out


def _on_good_in_words(repair: Repair) -> str:
    """Returns what a repair makes of a good step."""
    plain, changed = map(name_of, repair.on_good or (math.nan, math.nan))
    if _changes_good(repair):
        return f"it changes good steps as well: the loss of one is {changed} instead of {plain}"
    return f"a good step is as before: loss {changed}"


def _schedule(facts: Facts) -> Site | None:
    """Returns the line that made a learning rate bad: the optimizer's step only meets with it."""
    begins = facts.schedule
    if begins is not None:
        file = SourceFile.open(begins.file)
        return None if file is None else last_return(file, begins.function, begins.line)
    paths = [site.file for site in (facts.step_site, facts.made) if site] + facts.rate_set_in
    files = [SourceFile.open(path) for path in paths]
    return next((at for file in files if file and (at := sets_rate_at(file))), None)


def _function_at(site: Site) -> str:
    """Returns the function around a place; code that is called again has a name of its own."""
    name = site.function
    file = SourceFile.open(site.file) if name.startswith("__") and not name.endswith("__") else None
    if file is None:
        return name
    return getattr(file.scope_of(site.line), "name", "<module>")


def _place(site: Site | None) -> dict[str, Any]:
    if site is None:
        return {"file": None, "line": None, "function": None, "code": None}
    first = max(site.line - _AROUND, 1)
    lines = [line.rstrip("\n") for line in linecache.getlines(site.file)]
    return {
        "file": site.file,
        "line": site.line,
        "function": _function_at(site),
        "code": site.code,
        "excerpt": {"first": first, "lines": lines[first - 1 : site.line + _AROUND]},
    }
