"""How nanguard gets into a process, and what is said where it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nanguard
from nanguard.errors import installing
from nanguard.run import again, command
from nanguard.run.attach import _Finder, attach
from nanguard.run.children import find_unguarded, python_path, why_not_guarded
from nanguard.run.control import VARIABLE, Options, from_environment, processes

SOURCE = Path(nanguard.__file__).parents[1]
ROOT = SOURCE.parent
PTH = SOURCE / "nanguard-run.pth"


def options(control, **kwargs):
    return Options(
        incidents="found", control=str(control), command=("python",), folder=".", **kwargs
    )


@pytest.fixture
def finders(monkeypatch):
    """Lets this process look as if torch had not been imported; returns our finders in it."""
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    return lambda: [finder for finder in sys.meta_path if isinstance(finder, _Finder)]


# The file in site-packages.


def test_the_wheel_has_the_file_where_python_looks_for_it():
    # tomllib comes with Python 3.11 only; one line need not be parsed.
    text = (ROOT / "pyproject.toml").read_text()
    assert f'"src/{PTH.name}" = "{PTH.name}"' in text
    (line,) = PTH.read_text().splitlines()
    assert line.startswith("import ")  # Python runs no other line


def test_without_a_run_the_file_does_nothing(monkeypatch, finders):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delitem(sys.modules, "nanguard.run.attach")
    exec(PTH.read_text())
    assert finders() == []
    assert "nanguard.run.attach" not in sys.modules


def test_a_process_is_attached_to_once(monkeypatch, finders, tmp_path):
    monkeypatch.setenv(VARIABLE, options(tmp_path).to_text())
    exec(PTH.read_text())
    assert len(finders()) == 1
    attach()
    assert len(finders()) == 1


def test_a_note_is_there_before_torch_is(monkeypatch, finders, tmp_path):
    monkeypatch.setenv(VARIABLE, options(tmp_path).to_text())
    attach()
    (finder,) = finders()
    assert finder.find_spec("json", None) is None
    assert processes(tmp_path, "reached-") == set()
    assert finder.find_spec("torch", None) is not None
    assert processes(tmp_path, "reached-") == {os.getpid()}


def test_options_of_another_version(monkeypatch, tmp_path):
    text = options(tmp_path).to_text()
    monkeypatch.setenv(VARIABLE, text[:-1] + ', "of_a_later_version": 3}')
    assert from_environment() == options(tmp_path)
    for wrong in ("3", "{}", "[]", "{"):
        monkeypatch.setenv(VARIABLE, wrong)
        assert from_environment() is None


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Returns an environment with torch, and a function that installs nanguard there."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    others = Path(torch.__file__).parents[1]
    (packages / "others.pth").write_text(f"{others}\n")

    def install():
        (packages / "_editable_impl_nanguard.pth").write_text(f"{SOURCE}\n")
        (packages / PTH.name).write_text(PTH.read_text())

    return folder / "bin" / "python", install


def run(folder, *arguments):
    guard = [sys.executable, "-m", "nanguard", "run", "--no-trace", "--incidents", "found", "--"]
    return subprocess.run(
        [*guard, *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


BAD = """
import json, os, pathlib, time
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
(model(torch.ones(1, 2)).sum() * float("nan")).backward()
optimizer.step()
control = pathlib.Path(json.loads(os.environ["NANGUARD_RUN"])["control"])
while not any(path for name in WANTED for path in control.glob(name)):
    time.sleep(0.02)  # whoever has started this ends it, if it never comes
"""


def test_a_pythonpath_of_its_own(tmp_path, environment):
    """Where nanguard is not installed, it is said at once; where it is, the run is guarded."""
    python, install = environment
    (tmp_path / "train.py").write_text(BAD.replace("WANTED", "['unguarded-*', 'attached-*']"))
    own = ["env", "PYTHONPATH=.", python, "train.py"]
    if not _has_nanguard(python):
        done = run(tmp_path, *own)
        assert done.returncode == 0, done.stderr
        assert (
            "uses torch but is not guarded: it was started with its own PYTHONPATH" in done.stderr
        )
        assert f"install nanguard in its environment ({installing()})" in done.stderr
        assert "nothing was guarded: process" in done.stderr
        assert not (tmp_path / "found").exists()
    install()
    done = run(tmp_path, *own)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("found/*/incident.json"))) == 1
    assert "not guarded" not in done.stderr
    assert "nanguard replay --explain found/step-000000-rank0" in done.stderr
    done = run(tmp_path, python, "-I", "train.py")
    assert len(list(tmp_path.glob("found/*/incident.json"))) == 2


def _has_nanguard(python):
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('nanguard') is None)"
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([python, "-c", code], env=bare, check=False).returncode == 0


# A process that cannot be reached.


def make_process(proc, pid, *, maps="", environ="", cmdline="python\0train.py"):
    (proc / str(pid)).mkdir()
    for name, text in (("maps", maps), ("environ", environ), ("cmdline", cmdline)):
        (proc / str(pid) / name).write_text(text)


TORCH = "7f00-7f01 r-xp 0 08:01 12 /x/torch/lib/libtorch_python.so\n"


@pytest.mark.parametrize(
    ("notes", "found"),
    [
        ([], 20),
        (["reached-20"], 30),
        (["attached-20"], 30),
        (["reached-20", "reached-30"], None),
        (["reached-x"], 20),
    ],
)
def test_finding_a_process_that_nanguard_is_not_in(tmp_path, notes, found):
    control, proc = tmp_path / "control", tmp_path / "proc"
    control.mkdir()
    proc.mkdir()
    make_process(proc, 10, cmdline="bash\0go.sh")
    make_process(proc, 20, maps=TORCH)
    make_process(proc, 21, maps=TORCH)  # forked by 20
    make_process(proc, 30, maps=TORCH, environ="PYTHONPATH=.\0")
    for note in notes:
        (control / note).touch()
    assert find_unguarded([10, 20, 21, 30, 40], control, proc) == found


def test_why_a_process_is_not_guarded(tmp_path):
    make_process(tmp_path, 7, environ="HOME=/h\0PYTHONPATH=.:/lib\0")
    make_process(tmp_path, 8, environ="PYTHONPATH=/boot:/lib\0")
    assert why_not_guarded(7, "/boot", tmp_path) == (
        "process 7 uses torch but is not guarded: it was started with its own PYTHONPATH; "
        f"install nanguard in its environment ({installing()})"
    )
    assert "its Python ignores PYTHONPATH (-E, -I or -S)" in why_not_guarded(8, "/boot", tmp_path)
    assert python_path(b"A=1\0PYTHONPATH=a:b\0") == ["a", "b"]
    assert python_path(b"") == []


# What is said at the end.


@pytest.mark.parametrize(
    ("notes", "code", "seconds", "line"),
    [
        ([], 0, 9.0, "nothing was guarded: no Python process that imports torch was seen"),
        ([], 1, 0.1, "nothing was guarded: no Python process that imports torch was seen"),
        (["unguarded-12"], 0, 9.0, "nothing was guarded: process 12 could not be reached"),
        (
            ["attached-12"],
            0,
            9.0,
            "torch was imported, but no training step was seen (no backward and no optimizer "
            "step), so nothing was guarded",
        ),
        (["attached-12"], 1, 9.0, None),
        (["attached-12"], 0, 1.9, None),
        (["attached-12", "stepped-12"], 0, 9.0, None),
        (["attached-12", "attached-13", "stepped-13"], 0, 9.0, None),
        (["attached-12", "steps-12"], 0, 9.0, None),
    ],
)
def test_a_run_in_which_nothing_was_guarded(tmp_path, notes, code, seconds, line):
    for note in notes:
        (tmp_path / note).touch()
    assert command.nothing_guarded(tmp_path, code, seconds) == line


def found(code="division-by-zero", *, ranks=1, method="second-run", verdict="reproduced"):
    return {
        "step": 5,
        "rank": 0,
        "run": {"ranks": ranks},
        "replay": {"method": method, "verdict": verdict},
        "cause": {"code": code, "summary": "why"},
        "origin": {"file": "/x/train.py", "line": 9, "op": "aten.div"},
    }


@pytest.mark.parametrize(
    ("incident", "words"),
    [
        (found(), "explain"),
        (found("unknown", method="in-place"), "replay --explain"),
        (found("unknown", verdict="not-replayed", method="second-run"), "replay --explain"),
        (found("unknown", method="second-run"), "explain"),
        (found("unknown", ranks=2), "explain"),
    ],
)
def test_the_command_that_tells_more(incident, words):
    line = command.outcome_line(incident, Path("/runs/a b"))
    assert "step 5: train.py:9: why   [" in line or "on rank 0: train.py:9: why   [" in line
    assert line.endswith(f"\n          nanguard {words} '/runs/a b'")


# Which commands are run a second time.


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    texts = {
        "yolo": "#!/venv/bin/python3.11\nimport sys\n",
        "trl": "#!/bin/sh\n'''exec' \"/a b/bin/python\" \"$0\" \"$@\"\n' '''\nimport sys\n",
        "own": "#!/usr/bin/env python3\n",
        "go": "#!/bin/bash\npython train.py\n",
        "binary": "\x7fELF python",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


@pytest.mark.parametrize(
    ("words", "plain"),
    [
        ("python train.py", True),
        ("python3.12 -m pkg", True),
        ("/venv/bin/python x.py", True),
        ("yolo train model=x", True),
        ("trl sft", True),
        ("own", True),
        ("go", False),
        ("binary", False),
        ("bash go.sh", False),
        ("no-such-command", False),
        ("uv run train.py", True),
        ("uv run --with rich python -m pkg", True),
        ("uv --quiet run trl sft", True),
        ("uv run bash go", False),
        ("uv run go.sh", False),
        ("uv sync", False),
        ("env PYTHONPATH=. python x.py", True),
        ("env -u A B=1 yolo", True),
        ("env A=1 bash go.sh", False),
        ("env -C dir python x.py", False),
        ("env", False),
    ],
)
def test_commands_that_are_one_python_program(scripts, words, plain):
    assert again.runs_only_python(words.split()) is plain
