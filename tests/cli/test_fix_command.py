"""``nanguard fix``: the verified change, in the file it was verified for, and in no other."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import pytest

from nanguard.cli.explaining import fix_incident, patched
from nanguard.errors import UsageError
from nanguard.run.run_record import sign
from nanguard.source.edits import SourceFile, addressed

if TYPE_CHECKING:
    from pathlib import Path

TEXT = "import torch\nx = torch.zeros(3)\n\ny = 1 / x\nprint(y)\n"
COMMAND = ["python", "train.py", "--name", "a b"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A project with an incident of its own, whose change is verified."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    write_incident(project, TEXT)
    return project


def write_incident(project: Path, text: str, **changes: Any) -> Path:
    file = project / "train.py"
    file.write_bytes(text.encode())
    source = SourceFile(str(file))
    diff = addressed(source.diff(source.text.replace("/ x", "/ x.clamp(min=1)")), str(project))
    fix = {
        "summary": "line 4: keep the divisor away from zero",
        "verified": True,
        "how": "replayed step 3: loss 0.5",
        "diff": diff,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
    }
    incident = {
        "schema": "nanguard.incident/1",
        "step": 3,
        "rank": 0,
        "sentence": "train.py:4 divides by x, which is 0: 1/0 = inf",
        "cause": {"code": "division-by-zero", "summary": "s", "confidence": 0.95},
        "replay": {"verdict": "reproduced"},
        "run": {
            "command": COMMAND,
            "folder": str(project),
            "signature": sign(COMMAND, str(project)),
            "ranks": 1,
        },
        "fixes": [{"summary": "look at the data", "verified": True}, {**fix, **changes}],
    }
    folder = project / ".nanguard" / "incidents" / "now" / "step-000003-rank0"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "incident.json").write_text(json.dumps(incident))
    return folder


def test_the_newest_incident_is_fixed_and_the_way_on_is_told(place, capsys):
    fix_incident(None, sure=False, dry_run=False)
    assert (place / "train.py").read_text() == TEXT.replace("/ x", "/ x.clamp(min=1)")
    said = capsys.readouterr().out
    assert "[division-by-zero, proven]" in said
    assert "+y = 1 / x.clamp(min=1)" in said
    assert "Verified: replayed step 3: loss 0.5" in said
    assert "To go on: nanguard run -- python train.py --name 'a b'" in said


def test_a_dry_run_writes_nothing(place, capsys):
    fix_incident(None, sure=False, dry_run=True)
    assert (place / "train.py").read_text() == TEXT
    assert "Would change" in capsys.readouterr().out


@pytest.mark.parametrize("known", [True, False], ids=["by its hash", "by its lines"])
def test_a_file_that_has_changed_is_left_alone(place, known):
    if not known:
        write_incident(place, TEXT, sha256=None)
    edited = TEXT.replace("y = 1 / x", "y = 2 / x")
    (place / "train.py").write_text(edited)
    with pytest.raises(UsageError, match=r"has changed since|does not hold the lines"):
        fix_incident(None, sure=False, dry_run=False)
    assert (place / "train.py").read_text() == edited


@pytest.mark.parametrize("name", ["../other.py", "train.txt", "", "/etc/passwd"])
def test_no_other_file_is_written(place, name):
    (place.parent / "other.py").write_text(TEXT)
    folder = write_incident(place, TEXT)
    incident = json.loads((folder / "incident.json").read_text())
    fix = incident["fixes"][1]
    fix["diff"] = fix["diff"].replace("b/train.py", f"b/{name}")
    (folder / "incident.json").write_text(json.dumps(incident))
    with pytest.raises(UsageError, match="not a Python file below"):
        fix_incident(folder, sure=True, dry_run=False)
    assert (place.parent / "other.py").read_text() == TEXT


def test_the_incident_of_somebody_else_needs_consent(place, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(place / "another"))
    with pytest.raises(UsageError, match="not made by you"):
        fix_incident(None, sure=False, dry_run=False)
    assert (place / "train.py").read_text() == TEXT
    fix_incident(None, sure=True, dry_run=False)
    assert "clamp" in (place / "train.py").read_text()


def test_what_was_not_verified_is_not_applied(place):
    write_incident(place, TEXT, verified=False)
    with pytest.raises(UsageError, match="no change to a file was verified"):
        fix_incident(None, sure=False, dry_run=False)


@pytest.mark.parametrize(
    "text",
    [
        TEXT.replace("\n", "\r\n"),
        "\ufeff" + TEXT,
        TEXT.rstrip("\n"),
        TEXT.replace("print(y)", "print(y)  # \x0c \u2028 end"),
        "y = 1 / x",
    ],
    ids=["crlf", "byte order mark", "no last line break", "odd characters", "one line"],
)
def test_everything_else_in_a_file_stays_as_it_is(tmp_path, text):
    file = tmp_path / "train.py"
    file.write_bytes(text.encode())
    source = SourceFile(str(file))
    new = source.text.replace("/ x", "/ x.clamp(min=1)")
    after = patched(file.read_bytes(), source.diff(new), "train.py")
    assert after == text.replace("/ x", "/ x.clamp(min=1)").encode()
