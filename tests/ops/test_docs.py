"""What the page about ops shows works as printed, and nothing is missing from it."""

from __future__ import annotations

from nanguard import ops
from tests.test_docs import ROOT, blocks


def test_the_examples_run():
    names: dict[str, object] = {}
    for index, code in enumerate(blocks("docs/ops.md")):
        exec(compile(code, f"docs/ops.md[{index}]", "exec"), names)


def test_every_op_is_on_the_page():
    page = (ROOT / "docs/ops.md").read_text()
    internal = {"WarmupCosine", "modulate", "rms_norm"}
    assert [name for name in ops.__all__ if name not in page and name not in internal] == []
