"""``nanguard check --fix``: Python files in place, configurations as a copy beside them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nanguard.check.config_fixes import Announced
from nanguard.check.engine import STDIN_NAME
from nanguard.check.files import check_python
from nanguard.check.history import keep
from nanguard.check.kinds import FileKind
from nanguard.check.outcome import FileOutcome, NotChecked, Repair, reason_of
from nanguard.check.repairing import ROUNDS, Repairing
from nanguard.errors import SourceError
from nanguard.source.edits import whole_diff
from nanguard.source.files import CONFIG_LIMIT, PYTHON_LIMIT, Decoded, decode, read_bytes
from nanguard.source.text import Text
from nanguard.source.writing import write_atomically

if TYPE_CHECKING:
    from collections.abc import Callable

    from nanguard.check.baseline import Baseline
    from nanguard.check.configs import Configs
    from nanguard.check.engine import Check
    from nanguard.check.outcome import Change, Outcome, Seen
    from nanguard.findings import Finding, Fix


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
        outcome.repairs.append(Repair(path, path, tuple(work.changes), diff, self.write))
        if self.write:
            text = Text(path, repaired)
            self._now(check_python(text, self.check.plan.selection, self.check.project))

    def _look_at(self, path: str) -> Callable[[str], list[Finding]]:
        def look(content: str) -> list[Finding]:
            text = Text(path, content)
            file = check_python(text, self.check.plan.selection, self.check.project)
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

    def _ask_parsers(self, copies: dict[str, str], changes: dict[str, list[Change]]) -> list[str]:
        """Loads copies with the parsers of their families; returns those that did not hold.

        What an installed parser reads otherwise than announced is taken back.
        """
        from nanguard.check.parsers import installed, parsed_by

        families = {path: kind for path in copies if (kind := self._family(path))}
        refused: list[str] = []
        for family in sorted(set(families.values())):
            paths = [path for path, kind in families.items() if kind == family]
            if not installed(family):
                continue
            both = [file for path in paths for file in (path, copies[path])]
            answers = parsed_by(family, *both)
            for place, path in enumerate(paths):
                fixes = [change.fix for change in changes[path]]
                original, copy = answers[2 * place : 2 * place + 2]
                try:
                    if isinstance(original, str):
                        continue  # it does not read the original either
                    self._allowed(path).compare(original, copy, fixes)
                except (SourceError, OSError) as error:
                    Path(copies[path]).unlink(missing_ok=True)
                    outcome = self.check.outcome
                    outcome.repairs = [r for r in outcome.repairs if r.path != path]
                    self._failed(path, error)
                    refused.append(path)
                else:
                    self._note(path, family)
        return refused

    def _family(self, path: str) -> str:
        """Returns the family of a configuration that has a parser of its own; empty if none has."""
        from nanguard.check.parsers import LIBRARIES

        found = {run.families[path].name for run in self.check.configs.runs() if path in run.parsed}
        found |= {
            run.families[path].name
            for run in self.check.configs.runs()
            if path in run.families and run.families[path].name == "hydra"
        }
        return next((name for name in sorted(found) if name in LIBRARIES), "")

    def _note(self, path: str, family: str) -> None:
        from nanguard.check.parsers import LIBRARIES

        repairs = self.check.outcome.repairs
        for place, repair in enumerate(repairs):
            if repair.path == path:
                repairs[place] = replace(repair, loaded_with=LIBRARIES[family])

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

    def _config(self, configs: Configs, path: str, changes: list[Change]) -> Configs:
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

    def _copied(self, path: str, repaired: str, changes: list[Change]) -> bool:
        """Writes the repaired copy of a configuration; returns whether there is one now."""
        target, written = copy_of(path), self.write and path != STDIN_NAME
        diff = whole_diff(path, target, self.check.configs.texts[path].content, repaired)
        repair = Repair(path, target, tuple(changes), diff, written)
        try:
            if written:
                self._write_copy(repair, repaired)
        except (SourceError, OSError) as error:
            self._failed(path, error)
            return False
        self.check.outcome.repairs.append(repair)
        return written

    def _write_copy(self, repair: Repair, repaired: str) -> None:
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


def _no_changes() -> defaultdict[str, list[Change]]:
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
    return reason_of(error) if isinstance(error, SourceError) else error.strerror or str(error)
