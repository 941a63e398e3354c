"""A short run of the fuzzer, what once failed, and that failures are found and made small."""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from benchmarks.fuzz import __main__ as fuzzer
from benchmarks.fuzz import campaign, mutations
from benchmarks.fuzz.campaign import (
    Campaign,
    Failure,
    as_a_user,
    check,
    minimised,
    placed,
    verdict_in,
)
from benchmarks.fuzz.inputs import KINDS, input_of, seeds
from benchmarks.fuzz.readers import refusal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).parent / "corpus"


class Said:
    """A check with the command that says what a test wants, at once."""

    def __init__(self, what: str, kind: str, data: bytes, code: int | None = None) -> None:
        del code
        self.kind, self.data, self.what, self.why, self.seconds = kind, data, what, "", 0.0

    def ended(self) -> bool:
        """Returns that all is said."""
        return True


def fuzz(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the fuzzer in a process of its own: its processes are copies of a small one."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.fuzz", *words, "--failures", str(folder / "failures")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_what_once_failed_does_not_fail_again(tmp_path: Path):
    done = fuzz("--corpus", str(CORPUS), folder=tmp_path)
    count = len(list(CORPUS.iterdir()))
    assert count > 20
    assert done.stdout == f"{count} files, 0 of them fail\n", done.stdout + done.stderr


def test_a_few_inputs_of_every_kind(tmp_path: Path):
    done = fuzz("--count", str(6 * len(KINDS)), "--seed", "17", folder=tmp_path)
    told = json.loads(done.stdout)
    assert told["failed"] == [], done.stderr
    assert {kind: about["inputs"] for kind, about in told["kinds"].items()} == dict.fromkeys(
        KINDS, 6
    )
    assert told["compared_with_their_own_reader"] > 10
    assert (done.returncode, list(tmp_path.iterdir())) == (0, [])


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_known_by_their_number(kind: str):
    first = [input_of(kind, 1, number) for number in range(3)]
    assert first == [input_of(kind, 1, number) for number in range(3)]
    assert len({*first, *(input_of(kind, 2, number) for number in range(3))}) > 3
    assert all(len(data) <= mutations.LARGEST for data in first)


def test_seeds_are_read_without_a_complaint(tmp_path: Path):
    """Nothing that is made of them would mean much otherwise."""
    for kind in KINDS:
        path = placed(kind, tmp_path / kind)
        path.write_bytes(seeds(kind)[0])
        assert not check(kind, path).failed
        assert refusal(kind, path) is None, kind


def test_failures_are_found_named_and_made_small(monkeypatch: pytest.MonkeyPatch):
    """A check that cannot bear one byte: every way in which it may fail is told apart."""

    def fragile(_kind: str, path: Path, _spread: Any = None) -> campaign.Verdict:
        data = path.read_bytes()
        if b"\xfe" in data:
            raise KeyError("fragile")
        return campaign.Verdict("clean")

    monkeypatch.setattr(campaign, "check", fragile)
    monkeypatch.setattr(campaign, "UserCheck", partial(Said, "traceback"))
    data = b"a: 1\n" * 40 + b"b: \xfe" + b"c: 2\n" * 40
    assert verdict_in("yaml", data) == "traceback"
    assert verdict_in("yaml", b"a: [") == "clean-but-refused"
    assert verdict_in("yaml", b"a: 1") == "clean"
    found = minimised(Failure("yaml", 3, "traceback", "KeyError", data))
    assert found.data == b"\xfe"
    monkeypatch.setattr(Campaign, "made", lambda _self, _kind, number: data[number * 190 :][:190])
    tally = Campaign(["yaml"]).run(count=2)
    assert [(one.number, one.what) for one in tally.failures] == [(1, "traceback")]


def test_what_a_user_does_not_see_is_counted_by_itself(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(campaign, "check", lambda *_: campaign.Verdict("not checked", "it failed"))
    monkeypatch.setattr(campaign, "UserCheck", partial(Said, ""))
    tally = Campaign(["yaml"]).run(count=2)
    assert (tally.failures, tally.unconfirmed) == (
        [],
        [("yaml", at, "traceback", "it failed") for at in range(2)],
    )


def test_the_exit_code_of_the_command_is_compared():
    assert as_a_user("yaml", b"lr: [1", 2) == ("", "")
    what, why = as_a_user("yaml", b"lr: [1", 0)
    assert (what, why.startswith("it is 2, not 0: ")) == ("exit-code", True)


@pytest.mark.parametrize(
    ("verdict", "refused"),
    [
        (campaign.Verdict("clean"), True),
        (campaign.Verdict("findings"), True),  # remarks about something else
        (campaign.Verdict("not checked"), True),  # nothing in it to check, and code 0
        (campaign.Verdict("findings", code=1), False),
        (campaign.Verdict("findings", named=True), False),
    ],
)
def test_whatever_exits_with_0_is_compared(
    monkeypatch: pytest.MonkeyPatch, verdict: campaign.Verdict, refused: bool
):
    monkeypatch.setattr(campaign, "check", lambda *_: verdict)
    says = verdict_in("yaml", b"a: [")
    assert says == ("clean-but-refused" if refused else verdict.says)


def test_figures_of_several_campaigns_add_up(tmp_path: Path):
    files = []
    for seed, begin in ((1, 0), (1, 1), (2, 0)):
        files.append(str(tmp_path / f"{seed}-{begin}.json"))
        words = ["--seed", str(seed), "--begin", str(begin), "--count", "2", "toml", "yaml"]
        assert fuzz(*words, "--output", files[-1], folder=tmp_path).returncode == 0
    done = fuzz("--sum", *files, folder=tmp_path)
    added = json.loads(done.stdout)
    assert (added["inputs"], added["kinds"]["toml"]["inputs"]) == (6, 3)
    assert sum(added["exit_codes"].values()) == 6
    assert [one["seed"] for one in added["campaigns"]] == [1, 1, 2]
    twice = fuzz("--sum", files[0], files[0], folder=tmp_path)
    assert twice.returncode == 2
    assert "inputs of seed 1 from 0 on are in two of them" in twice.stderr
    other = json.loads(Path(files[1]).read_text())
    Path(files[1]).write_text(json.dumps({**other, "code": "another"}))
    assert "2 states of the code" in fuzz("--sum", *files, folder=tmp_path).stderr


def test_what_a_process_holds_is_not_counted_as_the_cost_of_an_input(
    monkeypatch: pytest.MonkeyPatch,
):
    """Processes that had loaded torch once had no 64 MB left for a notebook."""
    held: list[mmap.mmap] = []

    def hungry(_kind: str, _path: Path, _spread: Any = None) -> campaign.Verdict:
        held.append(mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        return campaign.Verdict("not checked", code=2)

    monkeypatch.setattr(campaign, "check", hungry)
    tally = Campaign(["toml"]).run(count=4)
    assert (tally.failures, tally.unconfirmed, tally.codes["toml"]) == ([], [], {2: 4})


def test_an_input_that_takes_too_much_memory_is_seen(monkeypatch: pytest.MonkeyPatch):
    def greedy(_kind: str, _path: Path, _spread: Any = None) -> campaign.Verdict:
        mmap.mmap(-1, 2 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return campaign.Verdict("clean")

    monkeypatch.setattr(campaign, "check", greedy)
    monkeypatch.setattr(campaign, "UserCheck", partial(Said, "traceback"))
    tally = Campaign(["toml"]).run(count=1)
    assert [one.what for one in tally.failures] == ["traceback"]


def test_a_process_that_dies_costs_one_input(monkeypatch: pytest.MonkeyPatch):
    def deadly(_kind: str, path: Path, _spread: Any = None) -> campaign.Verdict:
        if b"die" in path.read_bytes():
            os.kill(os.getpid(), signal.SIGKILL)
        return campaign.Verdict("not checked", code=2)

    monkeypatch.setattr(campaign, "check", deadly)
    monkeypatch.setattr(campaign, "UserCheck", partial(Said, "died"))
    monkeypatch.setattr(Campaign, "made", lambda _self, _kind, n: b"die" if n == 2 else b"live")
    tally = Campaign(["toml"]).run(count=5)
    assert tally.inputs == {"toml": 5}
    assert [(one.number, one.what) for one in tally.failures] == [(2, "died")]


def test_an_input_that_ends_its_process_can_be_looked_at_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    def deadly(_kind: str, _path: Path, _spread: Any = None) -> campaign.Verdict:
        os.kill(os.getpid(), signal.SIGABRT)
        raise AssertionError("it is still there")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(campaign, "check", deadly)
    monkeypatch.setattr(sys, "argv", ["fuzz", "--again", "toml", "3"])
    assert fuzzer.main() == 1
    assert ", died; as a user: fine" in capsys.readouterr().out


PLAIN: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
KEYS = st.sampled_from(["lr", "learning_rate", "fp16", "epochs", "loss", "step", "optimizer"])


@settings(derandomize=True, max_examples=20, deadline=None, database=None,
          suppress_health_check=list(HealthCheck))  # fmt: skip
@given(tree=st.dictionaries(KEYS, PLAIN, min_size=1), kind=st.sampled_from(["json-config", "yaml"]))
def test_any_tree_of_values_is_read(tmp_path_factory: Any, tree: Any, kind: str):
    path = tmp_path_factory.getbasetemp() / KINDS[kind].file
    path.write_text(json.dumps(tree), encoding="utf-8")
    assert check(kind, path).failed == ""


@settings(derandomize=True, max_examples=60, deadline=None, database=None,
          suppress_health_check=list(HealthCheck))  # fmt: skip
@given(data=st.binary(max_size=300), kind=st.sampled_from(sorted(KINDS)))
def test_any_bytes_under_any_name_are_read(tmp_path_factory: Any, data: bytes, kind: str):
    path = tmp_path_factory.getbasetemp() / KINDS[kind].file
    path.write_bytes(data)
    assert check(kind, path).failed == ""
    path.unlink()


@settings(derandomize=True, max_examples=100, deadline=None, database=None)
@given(
    data=st.binary(max_size=200), seed=st.integers(), form=st.sampled_from(sorted(mutations.FORMS))
)
def test_anything_can_be_changed(data: bytes, seed: int, form: str):
    assert isinstance(mutations.mutated(data, [data, b""], form, random.Random(seed)), bytes)
