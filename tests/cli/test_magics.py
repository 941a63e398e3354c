"""Notebooks, run by a real kernel."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanguard.cli.magics import FindingsTable, IncidentCard, table
from nanguard.findings import Finding, Fix, Severity
from nanguard.incident import Incident

ROOT = Path(__file__).parents[2]
MODEL = """import torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)"""
LOOP = """%%nanguard{options}
for step in range(12):
    weight = torch.ones(4) * (step != 5)
    loss = (model(torch.randn(4, 4)).pow(2).squeeze(1) * weight).sum() / weight.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("last step", step)"""
FINITE = "print(all(bool(torch.isfinite(p).all()) for p in model.parameters()))"


# In a process of its own: clients of kernels leave sockets to the garbage collector.
CLIENT = """
import json, sys
import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

words = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
manager = AsyncKernelManager(kernel_name="python3")
manager._kernel_spec = KernelSpec(argv=words, display_name="Python", language="python")
book = nbformat.v4.new_notebook()
book.cells = [nbformat.v4.new_code_cell(cell) for cell in json.load(sys.stdin)]
NotebookClient(book, km=manager, timeout=180).execute()
print(json.dumps([[
    out.get("text", "") + out.get("data", {}).get("text/html", "") for out in cell["outputs"]
] for cell in book.cells]))
"""


def executed(folder: Path, *cells: str) -> list[str]:
    """Returns what each cell shows, as one text with the HTML in it."""
    for name in ("nbclient", "ipykernel"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install 'nanguard[notebook]'")
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", CLIENT],
        input=json.dumps(cells),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    return ["\n".join(parts) for parts in json.loads(done.stdout.splitlines()[-1])]


def test_a_cell_is_guarded_and_explained_below(tmp_path: Path):
    shown = executed(tmp_path, "%load_ext nanguard", MODEL, LOOP.format(options=""), FINITE)
    _, _, cell, finite = shown
    assert "last step 11" in cell
    assert "cell-4.py:4 divides by weight.sum(), which is 0: 0/0 = NaN" in cell
    assert '<span style="background:#cf222e22;font-weight:bold">   4     loss = (model' in cell
    assert "+    loss = (model(torch.randn(4, 4)).pow(2).squeeze(1) * weight).sum()" in cell
    assert "Verified: replayed step 5" in cell
    assert finite.strip() == "True"
    (run,) = (tmp_path / ".nanguard/runs").iterdir()
    assert (run / "metrics.jsonl").read_text().count("\n") == 12


def test_options_mistakes_and_other_commands(tmp_path: Path):
    (tmp_path / "a.py").write_text("import torch\nl = torch.log(torch.softmax(x, -1)).mean()\n")
    stopped, after, wrong, command, checked, version = executed(
        tmp_path,
        f"%load_ext nanguard\n{MODEL}",
        LOOP.format(options=" --on-bad stop"),
        FINITE,
        LOOP.format(options=" --on-bda stop"),
        LOOP.format(options=" python train.py"),
        "%nanguard check a.py",
        "%nanguard --version",
    )[1:]
    assert "the run was stopped" in stopped
    assert "last step" not in stopped
    assert after.strip() == "True"
    assert "Did you mean --on-bad or" in wrong
    assert "takes options only" in command
    assert "<table>" in checked
    assert "log-of-softmax" in checked
    assert version.startswith("nanguard ")


def test_what_was_patched_is_as_it_was_after_the_cell(tmp_path: Path):
    fault = "%%nanguard\nraise ValueError('mine')"
    look = "print(torch.autograd.backward.__qualname__, type(optimizer).step.__qualname__)"
    before, _, after = executed(
        tmp_path,
        f"%load_ext nanguard\n{MODEL}\n{look}",
        f"try:\n    get_ipython().run_cell_magic('nanguard', '', {fault[11:]!r})\n"
        "except ValueError:\n    pass",
        look,
    )
    assert before == after


FINDING = Finding(
    "DAT001", "label-out-of-range", Severity.ERROR, "<b>7</b> of 5", "d.csv", 3, fixes=(Fix("x"),)
)


def test_findings_are_a_table_in_which_nothing_of_a_file_is_html():
    shown = table([FINDING])._repr_html_()
    assert "&lt;b&gt;7&lt;/b&gt; of 5" in shown
    assert "<b>7" not in shown
    assert "d.csv:3" in shown
    assert repr(table([FINDING])) == "d.csv:3: error: <b>7</b> of 5"
    assert FindingsTable([])._repr_html_() == "nothing was found"


def test_an_incident_of_a_stranger_is_shown_as_text():
    hostile = "<script>alert(1)</script>"
    card = IncidentCard(
        Incident(
            {
                "step": 3,
                "sentence": hostile,
                "origin": {"line": 2, "excerpt": {"first": 1, "lines": ["", hostile]}},
                "fixes": [{"summary": hostile, "verified": True, "diff": f"+{hostile}"}],
            }
        ),
        Path("a b"),
    )
    assert "<script>" not in card._repr_html_()
    assert card._repr_html_().count("&lt;script&gt;") == 3
