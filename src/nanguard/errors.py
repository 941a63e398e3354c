"""The errors nanguard raises: each says what happened, where, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanguard.findings import Finding


class NanguardError(Exception):
    """Base of every error that nanguard raises on purpose.

    Attributes:
        what: What went wrong, with the value.
        where: The place: a call, a file, a step.
        do: What the reader can do about it.
    """

    def __init__(self, what: str, *, where: str, do: str) -> None:
        super().__init__(what, where, do)
        self.what = what
        self.where = where
        self.do = do

    def __str__(self) -> str:
        return f"{self.what}\n  where: {self.where}\n  do:    {self.do}"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.where, self.do), self.__dict__


def _rebuild(kind: type[NanguardError], what: str, where: str, do: str) -> NanguardError:
    error = kind.__new__(kind)
    NanguardError.__init__(error, what, where=where, do=do)
    return error


class UsageError(NanguardError, ValueError):
    """A call that cannot work as written."""


class MissingDependencyError(NanguardError, ImportError):
    """Something that has to be installed first."""

    @classmethod
    def of(
        cls, what: str, error: ModuleNotFoundError, *, extra: str = "torch"
    ) -> MissingDependencyError:
        """Returns the error for a part of nanguard whose import failed."""
        return cls(
            f"{what} needs {error.name}, which is not installed.",
            where=what,
            do=f"Install it: {installing(extra)}",
        )


def installing(extra: str = "") -> str:
    """Returns the command that installs nanguard, from where this one was installed.

    Args:
        extra: What comes with it.
    """
    import json
    import urllib.request
    from importlib.metadata import PackageNotFoundError, distribution

    wanted = f"[{extra}]" if extra else ""
    try:
        text = distribution("nanguard").read_text("direct_url.json")
        url = json.loads(text or "{}").get("url", "")
    except (PackageNotFoundError, OSError, ValueError):
        url = ""
    if url.startswith("file://"):
        name = urllib.request.url2pathname(url.removeprefix("file://"))
        return f"pip install '{name}{wanted}'"
    return f"pip install 'nanguard{wanted}'" if extra else "pip install nanguard"


class SettingsError(NanguardError, ValueError):
    """A setting outside its range."""


class RecordError(NanguardError, OSError):
    """A run folder that cannot be written."""


class SnapshotError(NanguardError):
    """A snapshot that cannot be taken, read or restored."""


class IncidentError(NanguardError):
    """An incident that cannot be read."""


class SourceError(NanguardError):
    """A file that cannot be read as what it should be."""

    @property
    def reason(self) -> str:
        """Why it cannot be read, with the line if one is known, without a full stop."""
        what = self.what.rstrip(".")
        _, _, line = self.where.rpartition(":")
        return f"{what} (line {line})" if line.isdigit() else what


class LaunchError(NanguardError):
    """A command that cannot be run."""


class NonFiniteError(NanguardError, ArithmeticError):
    """The guard stopped the run.

    The weights are those of the last good step, or of the last good snapshot.

    Attributes:
        finding: The finding that ended the run.
    """

    finding: Finding

    def __init__(self, finding: Finding, *, do: str) -> None:
        where = f"step {finding.step}" if finding.step is not None else "the run"
        if finding.where:
            where += f", {finding.where}"
        super().__init__(finding.message, where=where, do=do)
        self.finding = finding
