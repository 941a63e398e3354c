"""The prevention checklist of a project: what is done, what is not, and what cannot be known."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from nanguard.advice.checklist_points import PointTrace, PointVerdict, ProjectFacts, all_points
from nanguard.check.code_check import TooSlowError, cpu_limit
from nanguard.check.outcome import NotChecked
from nanguard.check.paths import FileKind
from nanguard.check.rule import KINDS
from nanguard.errors import SourceError
from nanguard.source.text import NOTEBOOK_LIMIT, PYTHON_LIMIT, Text, decode, read_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nanguard.advice.checklist_points import Answer
    from nanguard.check.engine import Check

SCHEMA = "nanguard.checklist/1"
# Folders in which projects carry code of others.
_VENDORED = frozenset(
    {
        "third_party",
        "thirdparty",
        "3rdparty",
        "vendor",
        "vendored",
        "external",
        "externals",
        "extern",
    }
    | {"submodules", "site-packages"}
)
_CPU_SECONDS_FOR_ALL = 30.0


@dataclass(frozen=True, slots=True)
class Checklist:
    """The checklist of a project, filled in.

    Attributes:
        answers: Every point with its answer, in order.
        checked: The files that were looked at.
        not_checked: What was not, and why.
    """

    answers: tuple[Answer, ...]
    checked: tuple[str, ...]
    not_checked: tuple[NotChecked, ...]

    def count(self, verdict: PointVerdict) -> int:
        """Returns how many points have this answer."""
        return sum(answer.verdict is verdict for answer in self.answers)

    def to_json(self) -> dict[str, Any]:
        """Returns the checklist as one object; fields are added over time, never renamed."""
        return {
            "schema": SCHEMA,
            "points": [answer.to_json() for answer in self.answers],
            "counts": {verdict.value: self.count(verdict) for verdict in PointVerdict},
            "checked": list(self.checked),
            "not_checked": [entry.to_json() for entry in self.not_checked],
        }


def fill_in(check: Check, paths: Sequence[str]) -> Checklist:
    """Returns the checklist of what a check has looked at.

    Args:
        check: A check that has run.
        paths: What it was given.
    """
    missed: list[NotChecked] = []
    traces = [
        *_of_code(check, missed),
        *_of_configs(check, missed),
        *_of_scripts(check, paths),
    ]
    selection = check.plan.selection
    ran = [rule.name for kind in KINDS for rule in selection.rules(kind)]
    findings = [seen.finding for seen in check.outcome.seen]
    facts = ProjectFacts.of(traces, findings, ran)
    return Checklist(
        tuple(point.answer(facts) for point in all_points()),
        tuple(check.outcome.checked),
        (*check.outcome.not_checked, *missed),
    )


def _of_code(check: Check, missed: list[NotChecked]) -> Iterator[PointTrace]:
    """Yields what the project's own code shows; what it carries from others is no evidence."""
    checked = set(check.outcome.checked)
    own = [(path, kind) for path, kind in check.code if not _is_vendored(path)]
    for path, kind in own or check.code:
        if path in checked:
            yield from _bounded(partial(_read, path, kind), path, missed)


def _of_configs(check: Check, missed: list[NotChecked]) -> list[PointTrace]:
    from nanguard.advice.checklist_traces import config_traces
    from nanguard.check.config.run_config import read_project

    documents = list(check.configs.documents.values())
    if not documents:
        return []

    def read() -> list[PointTrace]:
        return [trace for run in read_project(documents) for trace in config_traces(run)]

    return _bounded(read, "configurations", missed)


def _of_scripts(check: Check, paths: Sequence[str]) -> Iterator[PointTrace]:
    from nanguard.advice.checklist_traces import history_traces, is_script, script_traces
    from nanguard.check.paths import Search

    for found in Search(check.plan.exclude, check.plan.root).files(paths):
        if is_script(found.path):
            yield from script_traces(found.path)
    yield from history_traces(check.plan.root)


def _bounded(
    read: Callable[[], list[PointTrace]], path: str, missed: list[NotChecked]
) -> list[PointTrace]:
    """Returns what a reading gives; nothing if it fails or takes too long."""
    try:
        with cpu_limit(_CPU_SECONDS_FOR_ALL), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return read()
    except (SourceError, RecursionError, MemoryError, TooSlowError) as error:
        missed.append(NotChecked(path, f"not read for the checklist: {type(error).__name__}"))
    except Exception as error:  # noqa: BLE001 - one file less, and the answer says so
        said = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        missed.append(NotChecked(path, f"not read for the checklist: {said}"))
    return []


def _read(path: str, kind: FileKind) -> list[PointTrace]:
    if kind is not FileKind.NOTEBOOK:
        data = read_bytes(path, PYTHON_LIMIT)
        return _traces(Text(path, decode(path, data, python=True).content))
    from nanguard.source.text import Notebook

    content = decode(path, read_bytes(path, NOTEBOOK_LIMIT), python=False).content
    notebook = Notebook.read(path, content)
    return [
        PointTrace(
            trace.name, path, notebook.place(trace.line)[0] if trace.line else None, trace.words
        )
        for trace in _traces(notebook.code)
    ]


def _traces(text: Text) -> list[PointTrace]:
    from nanguard.advice.checklist_traces import FINITE, CodeTraces, syntax_traces
    from nanguard.check.code.code import Code
    from nanguard.check.code.training import Training

    code = Code.parse(text)
    if not code.relevant:
        return []
    if _is_test(text.path):
        found = [PointTrace("test", text.path, None, "tests of training code")]
        for call in Training.of(code).called(*FINITE):
            words = "a test asks for finite numbers"
            found.append(PointTrace("finite-test", text.path, call.line or None, words))
        return found
    found = [*CodeTraces(code).all(), *syntax_traces(code)]
    return sorted(found, key=lambda trace: trace.line or 0)


def _is_vendored(path: str) -> bool:
    return not _VENDORED.isdisjoint(PurePath(path).parts[:-1])


def _is_test(path: str) -> bool:
    pure = PurePath(path)
    named = pure.name.startswith("test_") or pure.stem.endswith("_test")
    return named or pure.name == "conftest.py"
