"""``--fix`` on configurations: a copy beside the original, with a history."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.check.plugin import check, names, reasons, told

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

FAULTY = """\
# a run
learning_rate: 0.5  # far too much
optim: adamw_torch
per_device_train_batch_size: 8
num_train_epochs: 3
warmup_ratio: 0.1
max_grad_norm: 1.0
"""


def history(folder: Path) -> list[dict]:
    return json.loads((folder / ".nanguard/configs/index.json").read_text())["entries"]


def test_the_original_stays_and_the_copy_is_clean(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_bytes(FAULTY.replace("\n", "\r\n").encode())
    done = check("run.yaml", "--fix", cwd=tmp_path)
    assert file.read_bytes() == FAULTY.replace("\n", "\r\n").encode()
    copy = (tmp_path / "run_fixed.yaml").read_bytes().decode()
    assert done.returncode == 0
    assert "run.yaml -> run_fixed.yaml (repaired)" in done.stdout
    assert "learning-rate-too-high" in done.stdout
    changed = [
        n
        for n, (a, b) in enumerate(zip(FAULTY.split("\n"), copy.split("\r\n"), strict=True))
        if a != b
    ]
    assert changed == [1]
    assert copy.split("\r\n")[1].endswith("# far too much")
    assert names(told("run_fixed.yaml", cwd=tmp_path)) == []


def test_every_copy_is_kept_with_what_changed_and_why(tmp_path: Path):
    (tmp_path / "run.yaml").write_text(FAULTY)
    check("run.yaml", "--fix", cwd=tmp_path)
    check("run.yaml", "--fix", cwd=tmp_path)
    (entry,) = history(tmp_path)
    assert (entry["file"], entry["target"]) == ("run.yaml", "run_fixed.yaml")
    assert [change["name"] for change in entry["changes"]] == ["learning-rate-too-high"]
    assert "-learning_rate: 0.5" in entry["diff"]
    kept = tmp_path / ".nanguard/configs" / entry["copy"]
    assert kept.read_text() == (tmp_path / "run_fixed.yaml").read_text()


def test_a_file_of_the_users_with_that_name_is_not_lost(tmp_path: Path):
    (tmp_path / "run.yaml").write_text(FAULTY)
    (tmp_path / "run_fixed.yaml").write_text("mine: 1\n")
    check("run.yaml", "--fix", cwd=tmp_path)
    mine, ours = history(tmp_path)
    assert mine["replaced"] is True
    assert (tmp_path / ".nanguard/configs" / mine["copy"]).read_text() == "mine: 1\n"
    assert "replaced" not in ours


def test_nothing_is_written_where_nothing_changes_or_may_be(tmp_path: Path):
    (tmp_path / "good.yaml").write_text(FAULTY.replace("0.5", "0.0005"))
    (tmp_path / "run.yaml").write_text(FAULTY)
    (tmp_path / "aside").write_text("untouched\n")
    (tmp_path / "run_fixed.yaml").symlink_to(tmp_path / "aside")
    report = told(".", "--fix", cwd=tmp_path)
    assert not (tmp_path / "good_fixed.yaml").exists()
    assert (tmp_path / "aside").read_text() == "untouched\n"
    assert "run_fixed.yaml is a link" in reasons(report)["run.yaml"]
    assert names(report) == [("learning-rate-too-high", 2)]


def test_what_could_not_be_repaired_is_still_told_beside_what_could(tmp_path: Path):
    (tmp_path / "a.yaml").write_text(FAULTY)
    (tmp_path / "b.yaml").write_text(FAULTY)
    (tmp_path / "b_fixed.yaml").symlink_to(tmp_path / "nowhere")
    report = told(".", "--fix", cwd=tmp_path)
    assert (tmp_path / "a_fixed.yaml").exists()
    assert [f["path"] for f in report["findings"]] == ["b.yaml"]


def test_a_broken_history_and_odd_names_do_no_harm(tmp_path: Path):
    odd = tmp_path / "..a b'\n;run.yaml"
    odd.write_text(FAULTY)
    index = tmp_path / ".nanguard/configs/index.json"
    index.parent.mkdir(parents=True)
    victim = tmp_path / "victim.yaml"
    victim.write_text("x: 1\n")
    old = [{"copy": "../../victim.yaml"}] * 300
    index.write_text(json.dumps({"entries": old}))
    check(".", "--fix", cwd=tmp_path)
    assert victim.exists()
    entries = history(tmp_path)
    assert len(entries) == 200
    assert (tmp_path / ".nanguard/configs" / entries[-1]["copy"]).is_file()
    assert "/" not in entries[-1]["copy"]
    index.write_text("[" * 99999)
    odd.write_text(FAULTY + "seed: 1\n")
    check(".", "--fix", cwd=tmp_path)
    assert len(history(tmp_path)) >= 1


def test_diff_and_standard_input_write_nothing(tmp_path: Path):
    (tmp_path / "run.yaml").write_text(FAULTY)
    done = check("run.yaml", "--diff", "--fail-on", "warning", cwd=tmp_path)
    assert done.returncode == 1
    assert "run.yaml -> run_fixed.yaml (would be repaired)" in done.stdout
    done = check("-", "--fix", "--fail-on", "warning", cwd=tmp_path, stdin=FAULTY)
    assert done.returncode == 1
    assert "-learning_rate: 0.5" in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["run.yaml"]


def test_a_comment_in_the_file_allows_a_finding(tmp_path: Path):
    allowed = FAULTY.replace("# far too much", "# nanguard: ignore[learning-rate-too-high] a test")
    (tmp_path / "run.yaml").write_text(allowed)
    report = told("run.yaml", cwd=tmp_path)
    assert names(report) == []
    assert report["suppressed"] == 1
    (tmp_path / "run.yaml").write_text(allowed.replace("0.5", "0.0005"))
    assert names(told("run.yaml", cwd=tmp_path)) == [("unused-ignore", 2)]


def test_what_is_no_configuration_of_a_run_is_said(tmp_path: Path):
    (tmp_path / "ci.yml").write_text("on: push\njobs:\n  test:\n    steps: []\n")
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    (tmp_path / "bomb.yaml").write_text(
        "a: &a [x, x]\n"
        + "".join(
            f"{c}: &{c} [*{p}, *{p}, *{p}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)
        )
    )
    (tmp_path / "tag.yaml").write_text("lr: !!python/object/apply:os.system ['touch pwned']\n")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "huge.json").write_text('{"lr": "' + "x" * (2 << 20) + '"}')
    report = told(".", cwd=tmp_path)
    why = reasons(report)
    assert why["ci.yml"] == "it holds no settings of a training run"
    assert {"broken.yaml", "deep.json"} <= set(why)
    assert why["huge.json"] == "it is larger than 1 MB"
    assert not (tmp_path / "pwned").exists()
