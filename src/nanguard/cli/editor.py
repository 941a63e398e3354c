"""``nanguard lsp``: findings and quick fixes in an editor, over the Language Server Protocol."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard import __version__
from nanguard.check.code.project import Project
from nanguard.check.code_check import check_python
from nanguard.check.config.key_usage import Usage, project_of
from nanguard.check.config_check import Configs
from nanguard.check.paths import Search
from nanguard.check.project_settings import find_project
from nanguard.check.selection import Selection
from nanguard.errors import NanguardError, SourceError, UsageError, installing
from nanguard.findings import Severity
from nanguard.source.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.cli.commands.before import LspOptions
    from nanguard.findings import Finding, Fix

_MOST_FILES = 5_000  # of a project that are listed around the file in the editor
_CONFIGS = (".yaml", ".yml", ".json", ".toml")
_LEVELS = {Severity.ERROR: 1, Severity.WARNING: 2, Severity.INFO: 3}  # as the protocol counts them


@dataclass(slots=True)
class Buffer:
    """A file as it stands in an editor, saved or not.

    Attributes:
        path: The file.
        content: What the editor shows.
    """

    path: str
    content: str

    def findings(self) -> list[Finding]:
        """Returns what the rules say about it; nothing about what cannot be read yet."""
        text = Text(self.path, self.content)
        settings = find_project(str(Path(self.path).parent))
        selection = Selection(
            settings.select, settings.ignore, settings.per_file, str(settings.root), settings.extend
        )
        try:
            if self.path.endswith(".py"):
                found = check_python(text, selection, Project(_code_around(self.path))).seen
            elif self.path.endswith(_CONFIGS):
                configs = Configs(usage=Usage(lambda: _code_around(self.path)))
                configs.read(text)
                found = [seen for file in configs.check(selection) for seen in file.seen]
            else:
                return []
        except (SourceError, NanguardError):
            return []  # half a line is no fault while somebody is typing
        return [seen.finding for seen in found]

    def position(self, offset: int) -> tuple[int, int]:
        """Returns the line and the character of an offset, both from 0, in UTF-16 units."""
        line, column = Text(self.path, self.content).position(offset)
        row = Text(self.path, self.content).line(line)[: column - 1]
        return line - 1, len(row.encode("utf-16-le")) // 2

    def span(self, finding: Finding) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns where a finding begins and ends: from its column to the end of its line."""
        text = Text(self.path, self.content)
        line = min(finding.line or 1, len(text.starts))
        row = text.line(line)
        indent = len(row) - len(row.lstrip())
        start = text.offset(line, (finding.column or indent + 1) - 1)
        return self.position(start), self.position(text.offset(line, len(row)))

    def changes(self, fix: Fix) -> Iterator[tuple[tuple[int, int], tuple[int, int], str]]:
        """Yields the changes of a fix: from where, to where, and what to write there."""
        for edit in fix.edits:
            yield self.position(edit.start), self.position(edit.end), edit.text


def _code_around(path: str) -> list[str]:
    root = project_of(path)
    if root is None:
        return [path]
    found = []
    for entry in Search((), root).files([root]):
        if entry.path.endswith(".py"):
            found.append(entry.path)
        if len(found) >= _MOST_FILES:
            break
    return found


def serve(_options: LspOptions) -> None:
    """Answers an editor on standard input and output until it hangs up.

    Raises:
        UsageError: pygls is not installed.
    """
    make_server().start_io()


def make_server() -> Any:
    """Returns the server, with everything it answers to.

    Raises:
        UsageError: pygls is not installed.
    """
    try:
        from lsprotocol import types
        from pygls.lsp.server import LanguageServer
    except ImportError as error:
        raise UsageError(
            "the language server needs pygls 2, which is not installed.",
            where="nanguard lsp",
            do=f"Install it: {installing('lsp')}",
        ) from error

    server = LanguageServer("nanguard", f"v{__version__}")

    def shown(uri: str) -> Buffer:
        document = server.workspace.get_text_document(uri)
        return Buffer(document.path, document.source)

    def place(span: tuple[tuple[int, int], tuple[int, int]]) -> Any:
        return types.Range(types.Position(*span[0]), types.Position(*span[1]))

    def diagnostic(buffer: Buffer, finding: Finding) -> Any:
        return types.Diagnostic(
            place(buffer.span(finding)),
            finding.message,
            severity=types.DiagnosticSeverity(_LEVELS[finding.severity]),
            code=finding.name,
            source="nanguard",
        )

    def publish(uri: str) -> None:
        buffer = shown(uri)
        found = [diagnostic(buffer, finding) for finding in buffer.findings()]
        server.text_document_publish_diagnostics(types.PublishDiagnosticsParams(uri, found))

    def opened(params: types.DidOpenTextDocumentParams) -> None:
        publish(params.text_document.uri)

    def changed(params: types.DidChangeTextDocumentParams) -> None:
        publish(params.text_document.uri)

    def saved(params: types.DidSaveTextDocumentParams) -> None:
        publish(params.text_document.uri)

    def actions(params: types.CodeActionParams) -> list[types.CodeAction]:
        uri = params.text_document.uri
        buffer = shown(uri)
        lines = range(params.range.start.line, params.range.end.line + 1)
        return [
            types.CodeAction(
                f"nanguard: {fix.title}",
                kind=types.CodeActionKind.QuickFix,
                diagnostics=[diagnostic(buffer, finding)],
                is_preferred=fix.safe,
                edit=types.WorkspaceEdit(
                    {uri: [types.TextEdit(place((a, b)), new) for a, b, new in buffer.changes(fix)]}
                ),
            )
            for finding in buffer.findings()
            if (finding.line or 1) - 1 in lines
            for fix in finding.fixes
            if fix.edits
        ]

    server.feature(types.TEXT_DOCUMENT_DID_OPEN)(opened)
    server.feature(types.TEXT_DOCUMENT_DID_CHANGE)(changed)
    server.feature(types.TEXT_DOCUMENT_DID_SAVE)(saved)
    quick = types.CodeActionOptions(code_action_kinds=[types.CodeActionKind.QuickFix])
    server.feature(types.TEXT_DOCUMENT_CODE_ACTION, quick)(actions)
    return server
