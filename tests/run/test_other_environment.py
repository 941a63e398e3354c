"""nanguard in one environment (``uvx``, ``pipx``) guards a command of another without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).parents[2]
# What nanguard needs, and what a user's environment need not have.
OURS = (
    "nanguard", "_editable_impl_nanguard", "rich", "pathspec", "yaml", "_yaml", "tomli", "polars",
)  # fmt: skip
# What nanguard's own environment has: nothing of torch's.
NEEDED = ("rich", "pygments", "markdown_it", "mdurl", "pathspec", "yaml", "_yaml", "tomli")
UNSET = ("PYTHONPATH", "VIRTUAL_ENV")
SCRIPT = """
import importlib.util
import torch
from torch import nn
assert importlib.util.find_spec("rich") is None
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(8):
    weight = torch.ones(4) * (step != 5)
    loss = (model(torch.randn(4, 4)).pow(2).squeeze(1) * weight).sum() / weight.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def environment(folder: Path, wanted: Callable[[str], bool]) -> Path:
    """Makes an environment with some of the packages that are installed here."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    for entry in Path(torch.__file__).parents[1].iterdir():
        name = entry.name.partition(".")[0].partition("-")[0].lower()
        if wanted(name) and entry.suffix != ".pth" and not (packages / entry.name).exists():
            (packages / entry.name).symlink_to(entry)
    return folder / "bin"


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Path:
    """The programs of an environment that has torch, and nothing of nanguard's."""
    return environment(tmp_path_factory.mktemp("theirs"), lambda name: name not in OURS)


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Path:
    """The programs of an environment that has nanguard, and no torch."""
    programs = environment(tmp_path_factory.mktemp("ours"), lambda name: name in NEEDED)
    nanguard = programs / "nanguard"
    nanguard.write_text(
        f"#!{programs / 'python'}\nimport sys\nsys.path.insert(0, {str(ROOT / 'src')!r})\n"
        "from nanguard.cli import main\nmain()\n"
    )
    nanguard.chmod(0o755)
    return programs


def call(folder: Path, *words: str | Path, path: Sequence[Path] = (), **variables: str):
    """Calls nanguard as a shell does whose PATH begins with some folders."""
    usual = {key: value for key, value in os.environ.items() if key not in UNSET}
    found = os.pathsep.join([*map(str, path), os.environ["PATH"]])
    return subprocess.run(
        words,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env=usual | {"PATH": found} | variables,
    )


def test_a_command_of_an_environment_without_nanguard_is_guarded_and_explained(
    tmp_path, ours, theirs
):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = call(
        tmp_path,
        ours / "nanguard",
        "run",
        "--run-dir",
        "found",
        "--",
        theirs / "python",
        "train.py",
    )
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("found/*/incident.json")
    incident = json.loads(path.read_text())
    assert (incident["step"], incident["cause"]["code"]) == (5, "division-by-zero")
    assert incident["fixes"][0]["verified"]
    assert (tmp_path / "found/metrics.jsonl").read_text().count("\n") == 8
    # What comes after is asked of nanguard's environment, too.
    assert "division-by-zero" in call(tmp_path, ours / "nanguard", "explain", "found").stdout
    assert call(tmp_path, ours / "nanguard", "fix", path.parent).returncode == 0
    assert "clamp" in (tmp_path / "train.py").read_text()


def test_python_is_the_users_where_a_tool_runner_puts_its_own_first(tmp_path, ours, theirs):
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("nanguard", "run", "--run-dir", "found", "--", "python", "train.py")
    done = call(tmp_path, ours / words[0], *words[1:], path=(ours, theirs))
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("found/*/incident.json"))) == 1


def test_python_is_that_of_an_environment_that_was_activated(tmp_path, ours, theirs):
    (tmp_path / "train.py").write_text("import sys\nprint(sys.prefix)\n")
    words = ("run", "--", "python", "train.py")
    done = call(
        tmp_path, ours / "nanguard", *words, path=(ours, theirs), VIRTUAL_ENV=str(ours.parent)
    )
    assert done.stdout == f"{ours.parent}\n", done.stderr
