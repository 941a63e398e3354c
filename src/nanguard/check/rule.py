"""What a rule is: a name, a reason, examples, and a way to find the fault."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from nanguard.findings import Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

Read = TypeVar("Read")
Reads = Literal["code", "config", "data", "checkpoint", "log"]


@dataclass(frozen=True, slots=True)
class Passes:
    """A text a rule is silent about, best one that looks like the fault and is not.

    Attributes:
        text: What the file holds.
        file: The name it has.
        made: Writes what no text can hold into a folder; the text then says what that is.
        beside: Other files in the same folder, by name.
    """

    text: str
    file: str = ""
    made: Callable[[Path], None] | None = None
    beside: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fails:
    """A text a rule speaks about.

    Attributes:
        text: What the file holds.
        line: The line it speaks about, counted from 1; None for any.
        file: The name it has.
        fixed: What the file holds once the rule's fixes are applied; None if not compared.
        made: Writes what no text can hold into a folder; the text then says what that is.
        beside: Other files in the same folder, by name.
    """

    text: str
    line: int | None = None
    file: str = ""
    fixed: str | None = None
    made: Callable[[Path], None] | None = None
    beside: Mapping[str, str] = field(default_factory=dict)


class Rule(ABC, Generic[Read]):
    """One fault, and how to see it before it breaks a run.

    The docstring is the rule's page: what it finds, then a paragraph that begins with *Why it
    breaks a run*, then what to write instead.

    Attributes:
        code: Stable code such as ``SRC012``; never used again for another rule.
        name: The fault in kebab-case; reads well after "allow".
        severity: How bad it is, unless a finding says otherwise.
        reads: The kind of source it looks at.
        seen_in: The address of a real incident.
        examples: Texts it is silent and not silent about.
        group: What it is about where that is not numbers; such a rule runs only if it, or its
            group, is asked for.
    """

    code: ClassVar[str]
    name: ClassVar[str]
    severity: ClassVar[Severity]
    reads: ClassVar[Reads]
    seen_in: ClassVar[str]
    examples: ClassVar[tuple[Passes | Fails, ...]]
    group: ClassVar[str] = ""

    @abstractmethod
    def check(self, source: Read) -> Iterator[Finding]:
        """Yields what is wrong with a source."""

    def finding(
        self,
        message: str,
        *,
        path: str,
        line: int | None,
        column: int | None = None,
        where: str | None = None,
        severity: Severity | None = None,
        fixes: tuple[Fix, ...] = (),
        **more: Any,
    ) -> Finding:
        """Returns a finding of this rule.

        Args:
            message: What was found, with the value.
            path: The file.
            line: The line, counted from 1.
            column: The column, counted from 1.
            where: The place in words.
            severity: Where this one is worse or milder than the rule in general.
            fixes: Ways to repair it, best first.
            more: Further fields of a finding.
        """
        return Finding(
            self.code,
            self.name,
            severity or self.severity,
            message,
            path=path,
            line=line,
            column=column,
            where=where,
            fixes=fixes,
            **more,
        )
