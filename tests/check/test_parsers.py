"""Repaired copies, as the parsers of their families read them."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from nanguard.check import family_parsers
from nanguard.check.config_fixes import Announced
from nanguard.check.engine import Check, Plan
from nanguard.check.fixing import Fixing
from nanguard.check.selection import Selection
from nanguard.errors import SourceError
from nanguard.findings import Edit, Fix
from nanguard.view.report.findings_formats import Page

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = (
    "output_dir: out\nlearning_rate: 0.01\nnum_train_epochs: 3\nmodel_name_or_path: bert-base\n"
)


def announced(path: Path) -> tuple[Announced, Fix]:
    path.write_text(CONFIG)
    made, fix = Announced(str(path), unsafe=False), Fix("lower", edits=(Edit(0, 0, ""),))
    made.keys[fix] = frozenset({"learning_rate"})
    return made, fix


def test_only_announced_keys_may_differ(tmp_path: Path):
    made, fix = announced(tmp_path / "a.yaml")
    before = {"learning_rate": "0.01", "num_train_epochs": "3", "derived": "1"}
    made.compare(before, {**before, "learning_rate": "5e-05", "derived": "2"}, [fix])
    with pytest.raises(SourceError, match="reads num_train_epochs otherwise in the copy"):
        made.compare(before, {**before, "num_train_epochs": "'3'"}, [fix])
    with pytest.raises(SourceError, match="refuses the copy: ValueError: no"):
        made.compare(before, "ValueError: no", [fix])


@pytest.mark.parametrize("spoiled", [False, True])
def test_a_copy_that_its_parser_reads_otherwise_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoiled: bool
):
    (tmp_path / "a.yaml").write_text(CONFIG)
    asked: list[tuple[str, ...]] = []

    def answers(family: str, *paths: str) -> list[dict[str, str]]:
        asked.append((family, *(path.rpartition("/")[2] for path in paths)))
        before = {"learning_rate": "0.01", "num_train_epochs": "3"}
        return [
            before,
            {**before, "learning_rate": "5e-05"} | ({"output_dir": "1"} if spoiled else {}),
        ]

    monkeypatch.setattr(family_parsers, "installed", lambda family: family == "huggingface")
    monkeypatch.setattr(family_parsers, "parsed_by", answers)
    check = Check(Plan(Selection(), root=str(tmp_path), jobs=1))
    check.run([str(tmp_path / "a.yaml")])
    outcome = Fixing(check).run()
    assert asked == [("huggingface", "a.yaml", "a_fixed.yaml")]
    assert (tmp_path / "a_fixed.yaml").exists() is not spoiled
    assert [repair.loaded_with for repair in outcome.repairs] == (
        [] if spoiled else ["transformers"]
    )


def unanswered(family: str, *paths: str) -> list[dict[str, str] | str]:
    raise SourceError(f"{family} did not answer within 30 s", where=family, do="Load it.")


@pytest.mark.parametrize(
    ("there", "answer", "why"),
    [
        (True, unanswered, "huggingface did not answer within 30 s"),
        (
            True,
            lambda _family, *paths: ["KeyError: x"] * len(paths),
            "transformers does not read the original: KeyError: x",
        ),
        (False, unanswered, "transformers is not installed"),
    ],
)
def test_a_copy_that_no_parser_has_loaded_is_not_called_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool, answer, why: str
):
    (tmp_path / "a.yaml").write_text(CONFIG)
    monkeypatch.setattr(family_parsers, "installed", lambda _family: there)
    monkeypatch.setattr(family_parsers, "parsed_by", answer)
    check = Check(Plan(Selection(), root=str(tmp_path), jobs=1))
    check.run([str(tmp_path / "a.yaml")])
    (repair,) = Fixing(check).run().repairs
    assert (tmp_path / "a_fixed.yaml").exists()
    assert not repair.loaded_with
    assert repair.unverified == why
    assert f"not verified: {why}" in Page(check.outcome).render()
    assert repair.to_json()["unverified"] == why


def test_a_parser_that_does_not_answer_in_time_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def late(*_command, **_options):
        raise subprocess.TimeoutExpired("python", 30)

    monkeypatch.setattr(family_parsers.subprocess, "run", late)
    with pytest.raises(SourceError, match="transformers did not answer within 30 s"):
        family_parsers.parsed_by("huggingface", str(tmp_path / "a.yaml"))


def test_the_real_parser_is_asked_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("accelerate")
    monkeypatch.setattr(family_parsers, "_PARSER_SECONDS", 600)
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    text = "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nmixed_precision: bf16\n"
    good.write_text(text)
    bad.write_text(text + "no_such_key: 1\n")
    read, refused = family_parsers.parsed_by("accelerate", str(good), str(bad))
    assert isinstance(read, dict)
    assert read["mixed_precision"] == "'bf16'"
    assert isinstance(refused, str)
    assert "no_such_key" in refused
