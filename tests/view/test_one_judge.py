"""Check, watch, report and serve say the same about a log: there is one judge."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nanguard.cli import main
from nanguard.view.report.verdict import judge
from nanguard.view.runs import open_runs
from nanguard.view.server.index import Folder
from nanguard.view.server.overview import Digest
from tests.labelled import labelled

if TYPE_CHECKING:
    from collections.abc import Callable

LOGS = Path(__file__).parents[1] / "logs"
CASES = [case["path"] for case in labelled(LOGS)]
assert len(CASES) > 50


@pytest.fixture
def nanguard(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    def run(*words: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["nanguard", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), capsys.readouterr().out

    return run


def test_all_commands_find_the_same_in_every_log(
    nanguard: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    disagree = []
    bad = 0
    for number, case in enumerate(CASES):
        path = LOGS / case
        _, text = nanguard("check", "--no-cache", "--format", "json", "--fail-on", "none", path)
        found = json.loads(text)["findings"]
        alarm = any(one["severity"] != "info" for one in found)
        bad += alarm
        watched, said = nanguard("watch", path, "--once", "--until-alarm")
        if (watched == 1) != alarm or ("ALARM" in said) != alarm:
            disagree.append(("watch", case))
        runs = open_runs([path])
        for run in runs:
            judge(run)
        shown = {(one["name"], one["line"]) for run in runs for one in run.findings}
        if shown != {(one["name"], one["line"]) for one in found}:
            disagree.append(("report", case))
        if faults_served(path, tmp_path / str(number)) != alarm:
            disagree.append(("serve", case))
    assert disagree == []
    assert 20 < bad < len(CASES) - 10


def faults_served(path: Path, root: Path) -> bool:
    """Returns whether the overview of a folder with this log speaks of findings."""
    root.mkdir()
    if path.is_dir():
        shutil.copytree(path, root / path.name)
    else:
        shutil.copy(path, root)
    summaries = [list(Digest().read(found))[-1] for found in Folder(root).runs().values()]
    assert summaries
    return any(one.findings for one in summaries)
