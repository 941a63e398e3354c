"""Secrets planted in twelve places are in no file that nanguard writes and nothing it prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from nanguard.record import RunRecord
from nanguard.run import again
from nanguard.run.control import leave
from nanguard.run.recovering import lineage

if TYPE_CHECKING:
    from pathlib import Path

INCIDENT = "bad/step-000002-rank0"
HEX = "0123456789abcdef0123456789abcdef0123456"
# One secret for each place, all different, so that a leak names its place.
PLANTED = {
    "option with a space": "plantedspace01",
    "option with a sign": "plantedsign02",
    "W&B key in the command": f"{HEX}a",
    "Hugging Face token in the command": "hf_plantedhubtoken0004",
    "OpenAI key in a line of source": "sk-plantedopenai00005",
    "password in an address": "plantedaddress06",
    "variable of the environment": f"{HEX}b",
    "message of an exception": "plantedraised08",
    "YAML": "plantedyaml09",
    "JSON in one line": "plantedjson10",
    "TOML": "plantedtoml11",
    "event of a guard": "plantedevent12",
}
SCRIPT = """\
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    x = torch.ones(3, 2) * (0.0 if step == 2 else 1.0)
    optimizer.zero_grad()
    loss = (x.log() * model(x)).mean(); key = "{OpenAI key in a line of source}"
    loss.backward()
    optimizer.step()
"""


def fill(text: str) -> str:
    for place, secret in PLANTED.items():
        text = text.replace(f"{{{place}}}", secret)
    return text


INPUTS = {
    "train.py": SCRIPT,
    "config.yaml": "optimizer: adam\nlr: 5.0\nfp16: true\nwandb_api_key: {YAML}\n",
    "config.json": '{"learning_rate": 5.0, "num_epochs": 3, "password": "{JSON in one line}"}',
    "config.toml": '[train]\nlearning_rate = 50.0\nbatch_size = 4\nauth_token = "{TOML}"\n',
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which everything was done that writes files, and what it printed."""
    folder = tmp_path_factory.mktemp("secrets")
    for name, text in INPUTS.items():
        (folder / name).write_text(fill(text))
    for name in ("tmp", "state"):
        (folder / name).mkdir()
    environment = {
        **os.environ,
        "TMPDIR": str(folder / "tmp"),
        "XDG_STATE_HOME": str(folder / "state"),
        "WANDB_API_KEY": PLANTED["variable of the environment"],
    }
    command = [
        sys.executable, "train.py",
        "--api-key", PLANTED["option with a space"],
        f"--password={PLANTED['option with a sign']}",
        "--wandb", PLANTED["W&B key in the command"],
        PLANTED["Hugging Face token in the command"],
        f"--data=postgres://me:{PLANTED['password in an address']}@host/db",
    ]  # fmt: skip
    told = []
    for number, words in enumerate(
        [
            ["run", "--track", "tensorboard", "--incidents", "bad", "--", *command],
            ["check", "--format", "json", "-o", "found.json", "."],
            ["report", ".", "-o", "report.html"],
            ["explain", INCIDENT],
        ]
    ):
        done = subprocess.run(
            [sys.executable, "-m", "nanguard", *words],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        said = "".join(
            line for line in (done.stdout + done.stderr).splitlines(keepends=True)
            if number > 0 or line.startswith("nanguard")
        )  # fmt: skip
        (folder / f"said-{number}.txt").write_text(said)
        told.append((done.returncode, done.stderr))
    assert (folder / "report.html").exists(), told
    write_records(folder, command)
    return folder


def write_records(folder: Path, command: list[str]) -> None:
    """Writes what a recovery, the processes of a run and a guard keep."""
    why = fill("RuntimeError: login failed for password={message of an exception}")
    line = lineage.Line(
        attempt=1, started="", ended="", command=command, checkpoint=None, step=None, changes={},
        reason=why, outcome="failed", code=1, steps=4,
    )  # fmt: skip
    lineage.append(folder / "recovered", line)
    leave(folder, "raised-17", why)
    record = RunRecord(folder / "run", on_failure=print)
    record.event({"name": "x", "message": fill("could not log in: api_key={event of a guard}")})
    record.close()


def written(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in files
        if path.name not in INPUTS and "__pycache__" not in path.parts
    }


@pytest.mark.parametrize("place", PLANTED)
def test_no_secret_is_in_any_file(folder: Path, place: str):
    secret = PLANTED[place].encode()
    assert [name for name, content in written(folder).items() if secret in content] == []


def test_what_was_searched_is_what_holds_them_otherwise(folder: Path):
    """The places are in the files; only the secrets are not."""
    files = written(folder)
    incident = json.loads(files[f"{INCIDENT}/incident.json"])
    command = incident["run"]["command"]
    assert command[2:4] == ["--api-key", "(hidden)"]
    assert "--password=(hidden)" in command
    assert "--data=postgres://me:(hidden)@host/db" in command
    assert incident["origin"]["code"].endswith('key = "(hidden)"')
    for name in (f"recovered/{lineage.NAME}", "raised-17"):
        assert b"login failed for password=(hidden)" in files[name]
    assert b"api_key=(hidden)" in files["run/events.jsonl"]
    assert b"wandb_api_key: (hidden)" in files["report.html"]
    assert any("tfevents" in name for name in files)
    assert b"learning_rate" in files["found.json"]


def test_a_command_is_still_known_as_the_users_own(folder: Path, monkeypatch: pytest.MonkeyPatch):
    place = folder / INCIDENT
    incident = json.loads((place / "incident.json").read_text())
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    assert again.is_trusted(incident, place)
    incident["run"]["command"][3] = "another"
    assert not again.is_trusted(incident, place)
