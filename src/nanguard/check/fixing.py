"""``nanguard check --fix``: Python files in place, configurations as a copy with its history."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard.check.code_check import check_python
from nanguard.check.config_fixes import Announced
from nanguard.check.engine import STDIN_NAME
from nanguard.check.outcome import ConfigChange, FileOutcome, FileRepair, NotChecked
from nanguard.check.paths import FileKind
from nanguard.errors import SourceError
from nanguard.source.edits import apply, together, whole_diff
from nanguard.source.text import (
    CONFIG_LIMIT,
    PYTHON_LIMIT,
    Decoded,
    Text,
    decode,
    own_folder,
    read_bytes,
    write_atomically,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from nanguard.check.config_check import Configs
    from nanguard.check.engine import Check
    from nanguard.check.outcome import Outcome, Seen
    from nanguard.check.selection import Baseline
    from nanguard.findings import Finding, Fix

ROUNDS = 10


@dataclass(slots=True)
class Repairing:
    """The repair of one text.

    Attributes:
        look: Returns what is found in a text; raises ``SourceError`` if it cannot be read.
        choose: Returns the fix to apply for a finding; None for none.
        changes: What has been changed.
    """

    look: Callable[[str], list[Finding]]
    choose: Callable[[Finding], Fix | None]
    changes: list[ConfigChange] = field(default_factory=list)
    _stubborn: set[str] = field(default_factory=set)
    _failed: set[tuple[str, str]] = field(default_factory=set)

    def run(self, content: str) -> str:
        """Returns the repaired text; the same one if there is nothing to repair.

        Raises:
            SourceError: The text itself cannot be read.
        """
        found = self.look(content)
        seen = {content}
        for _ in range(ROUNDS):
            step = self._step(content, found)
            if step is None:
                break
            repaired, after, changes = step
            if repaired in seen:
                break
            seen.add(repaired)
            self.changes += changes
            content, found = repaired, after
        return content

    def _step(
        self, content: str, found: list[Finding]
    ) -> tuple[str, list[Finding], list[ConfigChange]] | None:
        """Returns one round of fixes that all help; None if there are none."""
        while True:
            wanted = self._wanted(content, found)
            if not wanted:
                return None
            repaired = apply(content, [e for change in wanted for e in change.fix.edits])
            try:
                after = self.look(repaired)
                useless = _useless(wanted, found, after)
            except SourceError:
                useless = {change.finding.name for change in wanted}
            if not useless:
                return repaired, after, wanted
            suspects = [change for change in wanted if change.finding.name in useless]
            worst = {_place(c, content) for c in suspects if not self._helps(content, found, c)}
            self._failed |= worst
            if not worst:
                self._stubborn |= useless

    def _wanted(self, content: str, found: list[Finding]) -> list[ConfigChange]:
        """Returns changes that can be made at once."""
        chosen = [
            ConfigChange(finding, fix)
            for finding in found
            if finding.name not in self._stubborn and (fix := self.choose(finding)) is not None
        ]
        chosen = [change for change in chosen if _place(change, content) not in self._failed]
        fixes = together([change.fix for change in chosen], content)
        kept: list[ConfigChange] = []
        for change in chosen:
            if change.fix in fixes:
                fixes.remove(change.fix)
                kept.append(change)
        return kept

    def _helps(self, content: str, found: list[Finding], change: ConfigChange) -> bool:
        """Returns whether a fix alone leaves the text readable and its rule with less to say."""
        try:
            after = self.look(apply(content, change.fix.edits))
        except SourceError:
            return False
        return not _useless([change], found, after)


def _place(change: ConfigChange, content: str) -> tuple[str, str]:
    """Returns which fix this is, in a way that holds when other lines are changed."""
    first = min(edit.start for edit in change.fix.edits)
    last = max(edit.end for edit in change.fix.edits)
    start, end = content.rfind("\n", 0, first) + 1, content.find("\n", last)
    return change.finding.name, content[start : end if end >= 0 else None]


def _useless(wanted: list[ConfigChange], before: list[Finding], after: list[Finding]) -> set[str]:
    """Returns the rules whose findings are not fewer by as many as were to be repaired."""
    tried = Counter(change.finding.name for change in wanted)
    old = Counter(finding.name for finding in before)
    new = Counter(finding.name for finding in after)
    return {name for name, count in tried.items() if new[name] > old[name] - count}


_SCHEMA = "nanguard.configs/1"
_MOST_KEPT = 200
_HISTORY_BYTES = 32 << 20
_STRANGE = re.compile(r"[^A-Za-z0-9._-]+")


def keep(folder: Path, repair: FileRepair, data: bytes) -> str:
    """Keeps a repaired copy, and the file it is going to replace if nothing else has it.

    Args:
        folder: Where the history is.
        repair: What was repaired, how and why.
        data: The copy.

    Returns:
        Why it could not be kept; empty if it was.
    """
    told = repair.to_json()
    why = {"changes": told["changes"], "diff": told["diff"]}
    try:
        own_folder(folder)
        entries = _entries(folder)
        known = {entry.get("sha256") for entry in entries}
        entries += _replaced(folder, repair, data, known)
        if _is_last(entries, repair, data):
            return ""
        entries.append(_stored(folder, repair, data) | why)
        for old in entries[:-_MOST_KEPT]:
            _forget(folder, old)
        kept = {"schema": _SCHEMA, "entries": entries[-_MOST_KEPT:]}
        write_atomically(folder / "index.json", (json.dumps(kept, indent=1) + "\n").encode())
    except OSError as error:
        return f"the history of configurations cannot be written: {error.strerror}"
    return ""


def _is_last(entries: list[dict[str, Any]], repair: FileRepair, data: bytes) -> bool:
    """Returns whether the newest copy of a file is the same one."""
    own = [entry for entry in entries if entry.get("file") == repair.path]
    return bool(own) and own[-1].get("sha256") == _sha(data)


def _replaced(
    folder: Path, repair: FileRepair, data: bytes, known: set[Any]
) -> list[dict[str, Any]]:
    """Keeps a file of the user's that happens to have the name of the copy."""
    place = Path(repair.target)
    if not place.is_file() or place.stat().st_size > _HISTORY_BYTES:
        return []
    before = place.read_bytes()
    if before == data or _sha(before) in known:
        return []
    return [_stored(folder, repair, before) | {"changes": [], "diff": "", "replaced": True}]


def _stored(folder: Path, repair: FileRepair, data: bytes) -> dict[str, Any]:
    place = Path(repair.target)
    sha = _sha(data)
    stem = _STRANGE.sub("_", place.stem)[:80].lstrip(".") or "config"
    ending = _STRANGE.sub("_", place.suffix)[:10]
    name = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}-{sha[:8]}{ending}"
    write_atomically(folder / name, data)
    return {
        "file": repair.path,
        "target": repair.target,
        "copy": name,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "sha256": sha,
    }


def _entries(folder: Path) -> list[dict[str, Any]]:
    try:
        if (folder / "index.json").stat().st_size > _HISTORY_BYTES:
            return []
        told = json.loads((folder / "index.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return []
    entries = told.get("entries") if isinstance(told, dict) else None
    return [e for e in entries if isinstance(e, dict)] if isinstance(entries, list) else []


def _forget(folder: Path, entry: dict[str, Any]) -> None:
    """Removes an old copy, if its name is one that this module gives."""
    name = entry.get("copy")
    if isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name):
        with contextlib.suppress(OSError):
            (folder / name).unlink()


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(slots=True)
class Fixing:
    """The repair of everything a check has found.

    Attributes:
        check: The check, after it has run.
        unsafe: Whether Python files also get fixes that change what they compute, and
            configurations those that change a key, or a value whose reader is not known.
        write: Whether files are written.
        baseline: What is known, and therefore left as it is.
    """

    check: Check
    unsafe: bool = False
    write: bool = True
    baseline: Baseline | None = None
    _announced: dict[str, Announced] = field(default_factory=dict)

    def run(self) -> Outcome:
        """Returns the outcome with what was repaired, and with what is left to be found."""
        outcome = self.check.outcome
        before = {seen.finding.path for seen in outcome.seen if any(seen.diffs)}
        for path, kind in self.check.code:
            if path in before and kind is FileKind.PYTHON:
                self._python(path)
        left = self._configs()
        if self.write:
            for file in left:
                self._now(file)
        return outcome

    def _python(self, path: str) -> None:
        outcome = self.check.outcome
        try:
            decoded = decode(path, read_bytes(path, PYTHON_LIMIT), python=True)
            _refuse(path, decoded)
            work = Repairing(self._look_at(path), self._choice)
            repaired = work.run(decoded.content)
            if repaired == decoded.content:
                return
            if self.write:
                write_atomically(Path(path), decoded.encode(repaired))
        except (SourceError, OSError) as error:
            self._failed(path, error)
            return
        diff = whole_diff(path, path, decoded.content, repaired)
        outcome.repairs.append(FileRepair(path, path, tuple(work.changes), diff, self.write))
        if self.write:
            text = Text(path, repaired)
            self._now(
                check_python(text, self.check.plan.selection, self.check.projects.get(text.path))
            )

    def _look_at(self, path: str) -> Callable[[str], list[Finding]]:
        def look(content: str) -> list[Finding]:
            text = Text(path, content)
            file = check_python(text, self.check.plan.selection, self.check.projects.get(text.path))
            return self._unknown(file.seen)

        return look

    def _unknown(self, seen: list[Seen]) -> list[Finding]:
        kept = self.baseline.new(seen) if self.baseline is not None else seen
        return [one.finding for one in kept]

    def _choice(self, finding: Finding) -> Fix | None:
        return next((f for f in finding.fixes if f.edits and (f.safe or self.unsafe)), None)

    def _configs(self) -> list[FileOutcome]:
        """Repairs configurations until no file has a fix left; returns what is left in all.

        A repair of one file can bring out what is wrong with another, so all are looked at again.
        """
        configs, changes = self.check.configs, _no_changes()
        for _ in range(ROUNDS):
            before = dict(configs.texts)
            for path in self._fixable(configs):
                configs = self._config(configs, path, changes[path])
            if configs.texts == before:
                break
        copies, as_it_was = {}, set()
        for path, text in configs.texts.items():
            if text.content == self.check.configs.texts[path].content:
                continue
            if self._copied(path, text.content, changes[path]):
                copies[path] = copy_of(path)
            else:
                as_it_was.add(path)
        if self.write:
            for path in self._ask_parsers(copies, changes):
                as_it_was.add(path)
                del copies[path]
        if not copies:
            return []
        left = [file for file in configs.check(self.check.plan.selection) if file.checked]
        return [_renamed(f, copies.get(f.path)) for f in left if f.path not in as_it_was]

    def _ask_parsers(
        self, copies: dict[str, str], changes: dict[str, list[ConfigChange]]
    ) -> list[str]:
        """Loads copies with the parsers of their families; returns those that did not hold.

        What an installed parser reads otherwise than announced is taken back.
        """
        from nanguard.check.family_parsers import LIBRARIES, installed, parsed_by

        families = {path: kind for path in copies if (kind := self._family(path))}
        refused: list[str] = []
        for family in sorted(set(families.values())):
            paths = [path for path, kind in families.items() if kind == family]
            if not installed(family):
                for path in paths:
                    self._note(path, unverified=f"{LIBRARIES[family]} is not installed")
                continue
            both = [file for path in paths for file in (path, copies[path])]
            try:
                answers = parsed_by(family, *both)
            except SourceError as error:
                for path in paths:
                    self._note(path, unverified=error.reason)
                continue
            for place, path in enumerate(paths):
                fixes = [change.fix for change in changes[path]]
                original, copy = answers[2 * place : 2 * place + 2]
                try:
                    if isinstance(original, str):
                        why = f"{LIBRARIES[family]} does not read the original: {original}"
                        self._note(path, unverified=why)
                        continue
                    self._allowed(path).compare(original, copy, fixes)
                except (SourceError, OSError) as error:
                    Path(copies[path]).unlink(missing_ok=True)
                    outcome = self.check.outcome
                    outcome.repairs = [r for r in outcome.repairs if r.path != path]
                    self._failed(path, error)
                    refused.append(path)
                else:
                    self._note(path, loaded_with=LIBRARIES[family])
        return refused

    def _family(self, path: str) -> str:
        """Returns the family of a configuration that has a parser of its own; empty if none has."""
        from nanguard.check.family_parsers import LIBRARIES

        found = {run.families[path].name for run in self.check.configs.runs() if path in run.parsed}
        found |= {
            run.families[path].name
            for run in self.check.configs.runs()
            if path in run.families and run.families[path].name == "hydra"
        }
        return next((name for name in sorted(found) if name in LIBRARIES), "")

    def _note(self, path: str, *, loaded_with: str = "", unverified: str = "") -> None:
        """Writes down what became of a copy when its parser was asked."""
        repairs = self.check.outcome.repairs
        for place, repair in enumerate(repairs):
            if repair.path == path:
                repairs[place] = replace(repair, loaded_with=loaded_with, unverified=unverified)

    def _fixable(self, configs: Configs) -> list[str]:
        files = configs.check(self.check.plan.selection)
        fixable = [f for f in files if any(map(_first, self._unknown(f.seen)))]
        return [
            f.path
            for f in fixable
            if any(map(_first, self._allowed(f.path).allowed(self._unknown(f.seen), configs)))
        ]

    def _allowed(self, path: str) -> Announced:
        return self._announced.setdefault(path, Announced(path, unsafe=self.unsafe))

    def _config(self, configs: Configs, path: str, changes: list[ConfigChange]) -> Configs:
        """Returns the configurations with one of them repaired."""
        selection, near = self.check.plan.selection, configs.around(path)

        def look(content: str) -> list[Finding]:
            now = near.replaced(Text(path, content))
            files = now.check(selection)
            found = self._unknown([seen for f in files if f.path == path for seen in f.seen])
            return self._allowed(path).allowed(found, now)

        work = Repairing(look, _first)
        try:
            repaired = work.run(configs.texts[path].content)
            configs = configs.replaced(Text(path, repaired))
        except SourceError as error:
            self._failed(path, error)
            return configs
        changes += work.changes
        return configs

    def _copied(self, path: str, repaired: str, changes: list[ConfigChange]) -> bool:
        """Writes the repaired copy of a configuration; returns whether there is one now."""
        target, written = copy_of(path), self.write and path != STDIN_NAME
        diff = whole_diff(path, target, self.check.configs.texts[path].content, repaired)
        repair = FileRepair(path, target, tuple(changes), diff, written)
        try:
            if written:
                self._write_copy(repair, repaired)
        except (SourceError, OSError) as error:
            self._failed(path, error)
            return False
        self.check.outcome.repairs.append(repair)
        return written

    def _write_copy(self, repair: FileRepair, repaired: str) -> None:
        path, target = repair.path, repair.target
        if Path(target).is_symlink():
            raise SourceError(f"{target} is a link", where=path, do="Remove the link.")
        decoded = decode(path, read_bytes(path, CONFIG_LIMIT), python=False)
        data = decoded.encode(repaired)
        folder = Path(self.check.plan.root) / ".nanguard" / "configs"
        fixes = [change.fix for change in repair.changes]
        self._allowed(path).check(decoded.encode(decoded.content), data, fixes)
        lost = keep(folder, repair, data)
        if lost:
            self.check.outcome.not_checked.append(NotChecked(str(folder), lost))
        write_atomically(Path(target), data)
        self._allowed(path).check(data, read_bytes(target, CONFIG_LIMIT), ())

    def _failed(self, path: str, error: SourceError | OSError) -> None:
        entry = NotChecked(path, f"it was not repaired: {_said(error)}")
        self.check.outcome.not_checked.append(entry)

    def _now(self, file: FileOutcome) -> None:
        """Replaces what was found in a file by what is found in it now."""
        paths = {file.path, *(seen.finding.path for seen in file.seen)}
        outcome = self.check.outcome
        outcome.seen = [seen for seen in outcome.seen if seen.finding.path not in paths]
        outcome.seen += file.seen
        outcome.seen.sort(key=lambda seen: (seen.finding.path or "", seen.finding.line or 0))


def _no_changes() -> defaultdict[str, list[ConfigChange]]:
    return defaultdict(list)


def _first(finding: Finding) -> Fix | None:
    return next((fix for fix in finding.fixes if fix.edits), None)


def _refuse(path: str, decoded: Decoded) -> None:
    """Raises if a file cannot be written back as it was."""
    if Path(path).is_symlink():
        raise SourceError("it is a link", where=path, do="Name the file itself.")
    if not decoded.exact:
        raise SourceError("its lines end in an old way", where=path, do="Convert them first.")


def copy_of(path: str) -> str:
    """Returns the name of the repaired copy of a configuration."""
    place = Path(path)
    return str(place.with_name(f"{place.stem}_fixed{place.suffix}"))


def _renamed(file: FileOutcome, target: str | None) -> FileOutcome:
    if target is None:
        return file
    moved = [replace(s, finding=replace(s.finding, path=target)) for s in file.seen]
    return replace(file, seen=moved)


def _said(error: SourceError | OSError) -> str:
    return error.reason if isinstance(error, SourceError) else error.strerror or str(error)
