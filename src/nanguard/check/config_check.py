"""The check of configurations, all of them together, and of the data they point to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nanguard.check.code_check import TooSlowError, cpu_limit
from nanguard.check.config.key_usage import Usage
from nanguard.check.outcome import (
    FileOutcome,
    NotChecked,
    Omission,
    failure,
    in_order,
    judge,
    seen_in,
)
from nanguard.check.rule import all_rules
from nanguard.check.selection import ignores_in, suppress, unused
from nanguard.errors import SourceError
from nanguard.findings import Severity

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nanguard.check.selection import Selection
    from nanguard.findings import Finding
    from nanguard.source.text import Text

_CPU_SECONDS_FOR_ALL = 15.0
_PART_LIMIT = 64 << 10  # characters; a file that is part of another one's settings is short
_PARTS = 2_000
_TOLD_ONCE = frozenset({"missing-gradient-clipping"})
NO_TRAINING = "it holds no settings of a training run"


@dataclass(slots=True)
class Configs:
    """Configurations that are judged together.

    Attributes:
        texts: Their texts, by path.
        documents: What was read from them, by path.
        left_out: What came of files that cannot be read, or are about something else.
        usage: What the project's code reads.
    """

    texts: dict[str, Text] = field(default_factory=dict)
    documents: dict[str, Any] = field(default_factory=dict)
    left_out: list[FileOutcome] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    _parts: int = 0
    _named: set[str] = field(default_factory=set)
    _read: list[Any] | None = None

    def read(self, text: Text, *, sure: bool = True, named: bool = True) -> bool:
        """Reads one more file; returns whether it has its place here.

        Args:
            text: What the file holds.
            sure: Whether it is a configuration; else one that cannot be read is none.
            named: Whether the user named it; else it may as well be about something else.
        """
        reason = self._why_not(text)
        if named:
            self._named.add(text.path)
        if reason and sure:
            unrelated = reason == NO_TRAINING
            omission = Omission.UNRELATED if unrelated else Omission.UNREADABLE
            expected = unrelated and not named
            left_out = FileOutcome.left_out(text.path, reason, omission, expected=expected)
            self.left_out.append(left_out)
        return sure or not reason

    def _why_not(self, text: Text) -> str:
        """Takes a file in; returns why not if it has nothing to do with a run."""
        from nanguard.check.config.document import looks_like_training, read_document
        from nanguard.check.config.toml_reader import must_be_toml

        try:
            with cpu_limit(_CPU_SECONDS_FOR_ALL):
                document = read_document(text)
                if not looks_like_training(document) and not self._may_be_part(text):
                    if document.format == "toml":  # a key that stands twice: no rule will say so
                        must_be_toml(text)
                    return NO_TRAINING
        except SourceError as error:
            return error.reason
        except (RecursionError, MemoryError):
            return "it is nested too deeply"
        except TooSlowError:
            return "it took too long to read"
        except Exception as error:  # noqa: BLE001 - the other files have to be checked
            return failure(error)
        self.texts[text.path] = text
        self.documents[text.path] = document
        return ""

    def _may_be_part(self, text: Text) -> bool:
        """Returns whether a file may be meant to be composed into the settings of a run."""
        self._parts += 1
        yaml = text.path.endswith((".yaml", ".yml"))
        return yaml and len(text.content) <= _PART_LIMIT and self._parts <= _PARTS

    def replaced(self, text: Text) -> Configs:
        """Returns the same configurations with another text for one of them.

        Raises:
            SourceError: The text cannot be read.
        """
        from nanguard.check.config.document import read_document

        return Configs(
            {**self.texts, text.path: text},
            {**self.documents, text.path: read_document(text)},
            self.left_out,
            self.usage,
        )

    def around(self, path: str) -> Configs:
        """Returns only those configurations that set up a run together with one of them."""
        runs = [[doc.path for doc in run.documents] for run in self.runs()]
        near = {path, *(other for run in runs if path in run for other in run)}
        return Configs(
            {name: text for name, text in self.texts.items() if name in near},
            {name: document for name, document in self.documents.items() if name in near},
            usage=self.usage,
        )

    def check(self, selection: Selection) -> list[FileOutcome]:
        """Returns what came of every file, in the order in which they were read."""
        if not self.documents:
            return list(self.left_out)
        findings, outcomes = self._judged(selection)
        for finding in findings:
            if finding.path in outcomes and selection.applies(
                finding.code, finding.name, finding.path
            ):
                outcomes[finding.path].seen.append(seen_in(self.texts[finding.path], finding))
        self._suppress(outcomes, selection)
        return [*outcomes.values(), *self.left_out]

    def alignment(self) -> list[dict[str, Any]]:
        """Returns the settings that have to agree between files, one row each."""
        try:
            from nanguard.check.config.precision import alignment

            return [row.to_json() for row in alignment(self.runs())]
        except Exception:  # noqa: BLE001 - a table less; what the rules say is there
            return []

    def runs(self) -> list[Any]:
        """Returns the runs that the configurations set up."""
        from nanguard.check.config.run_config import read_project

        if self._read is None:
            self._read = list(read_project(list(self.documents.values()), self.usage))
        return self._read

    def _judged(self, selection: Selection) -> tuple[list[Finding], dict[str, FileOutcome]]:
        outcomes = {path: FileOutcome(path) for path in self.texts}
        findings: list[Finding] = []
        waiting = set(self.texts)
        rules = selection.rules("config")
        try:
            with cpu_limit(_CPU_SECONDS_FOR_ALL):
                runs = self.runs()
                used = {document.path for run in runs for document in run.documents}
                for path in self.texts.keys() - used:
                    outcomes[path] = FileOutcome.left_out(
                        path, NO_TRAINING, Omission.UNRELATED, expected=path not in self._named
                    )
                waiting -= self.texts.keys() - used
                for run in runs:
                    some, failed = judge(rules, run, run.documents[0].path)
                    findings += some
                    for entry in failed:
                        outcomes[entry.path].not_checked.append(entry)
                    waiting -= {document.path for document in run.documents}
        except TooSlowError:
            _give_up(outcomes, waiting, "the configurations took too long")
        except Exception as error:  # noqa: BLE001 - the other files have to be reported
            _give_up(outcomes, waiting, failure(error))
        return in_order(_once(findings)), outcomes

    def _suppress(self, outcomes: dict[str, FileOutcome], selection: Selection) -> None:
        for path, outcome in outcomes.items():
            ignores = ignores_in(self.texts[path], python=False)
            if not ignores:
                continue
            kept, allowed = suppress([seen.finding for seen in outcome.seen], ignores)
            outcome.seen = [seen for seen in outcome.seen if seen.finding in kept]
            outcome.suppressed = allowed
            failed = {entry.rule for entry in outcome.not_checked}
            ran = _names(r for r in selection.rules("config") if r.name not in failed)
            known = {rule.name: rule.code for rule in all_rules()}
            complaints = unused(path, ignores, known, ran, selection)
            outcome.seen += [seen_in(self.texts[path], finding) for finding in complaints]
            outcome.seen.sort(key=lambda seen: seen.finding.line or 0)


def _once(findings: list[Finding]) -> list[Finding]:
    """Returns findings; what holds for the project as a whole is a remark after its first place."""
    same = [
        finding
        for finding in in_order(findings)
        if finding.name in _TOLD_ONCE and finding.severity is not Severity.INFO
    ]
    if len(same) < 2:
        return findings
    first = same[0]
    others = f"{len(same) - 1} more configuration{'s' if len(same) > 2 else ''}"
    told = replace(first, message=f"{first.message} (the same in {others})")
    rest = {id(finding) for finding in same[1:]}
    return [
        told
        if finding is first
        else replace(finding, severity=Severity.INFO)
        if id(finding) in rest
        else finding
        for finding in findings
    ]


def _give_up(outcomes: dict[str, FileOutcome], waiting: set[str], reason: str) -> None:
    """Takes note of the files that could not be judged any more."""
    for path in sorted(waiting):
        outcomes[path].checked = False
        outcomes[path].not_checked.append(NotChecked(path, reason))


def _names(rules: Iterable[Any]) -> set[str]:
    return {rule.name for rule in rules}
