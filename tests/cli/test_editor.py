"""Findings and quick fixes in an editor."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import pytest

from nanguard.cli.editor import Buffer, make_server
from nanguard.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

CODE = (
    "import torch\n\n\ndef f_loss(x, y):\n    '\U0001f600'; k = y > 0; return x.sum() / k.sum()\n"
)


def test_a_buffer_is_judged_as_it_stands_in_the_editor(tmp_path: Path):
    path = tmp_path / "a.py"
    path.write_text("import torch\n")
    buffer = Buffer(str(path), CODE)
    (finding,) = buffer.findings()
    assert finding.name == "division-by-unguarded-sum"
    # Editors count in UTF-16: the letter before it takes two units.
    assert buffer.span(finding) == ((4, 28), (4, 45))
    ((start, end, new),) = buffer.changes(finding.fixes[0])
    assert (start, end, new) == ((4, 38), (4, 45), "k.sum().clamp(min=1)")


def test_a_configuration_is_judged_and_half_a_line_is_not(tmp_path: Path):
    text = "lr: -1.0e-4\nepochs: 3\n"
    names = [f.name for f in Buffer(str(tmp_path / "a.yaml"), text).findings()]
    assert names == ["value-out-of-range"]
    assert Buffer(str(tmp_path / "a.py"), "import torch\ndef f(:\n").findings() == []
    assert Buffer(str(tmp_path / "a.txt"), text).findings() == []


def test_without_pygls_the_error_hands_over_the_cure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pygls.lsp.server", None)
    with pytest.raises(UsageError, match=r"pip install '.*\[lsp\]'"):
        make_server()


def test_a_real_client_gets_diagnostics_and_fixes(tmp_path: Path):
    pytest.importorskip("pygls.lsp.client")
    from lsprotocol import types
    from pygls.lsp.client import LanguageClient

    path = tmp_path / "a.py"
    path.write_text(CODE)

    async def talk() -> tuple[list[Any], list[Any]]:
        client, told = LanguageClient("test", "v1"), asyncio.get_running_loop().create_future()
        client.feature(types.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)(
            lambda params: told.done() or told.set_result(params.diagnostics)
        )
        await client.start_io(sys.executable, "-m", "nanguard", "lsp")
        capabilities = types.ClientCapabilities()
        await client.initialize_async(types.InitializeParams(capabilities=capabilities))
        item = types.TextDocumentItem(path.as_uri(), "python", 1, CODE)
        client.text_document_did_open(types.DidOpenTextDocumentParams(item))
        found = await told
        actions = await client.text_document_code_action_async(
            types.CodeActionParams(
                types.TextDocumentIdentifier(path.as_uri()),
                found[0].range,
                types.CodeActionContext(found),
            )
        )
        await client.shutdown_async(None)
        client.exit(None)
        return found, actions

    found, actions = asyncio.run(talk())
    assert [one.code for one in found] == ["division-by-unguarded-sum"]
    assert [action.title for action in actions] == ["nanguard: bound the divisor from below"]
