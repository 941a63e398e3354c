"""Scripts of many forms: each bad step is explained in place, and the run does not notice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parent / "scripts"


def line_of(script: str, mark: str) -> int:
    lines = (SCRIPTS / script).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))


POOLED = ("common.py", line_of("common.py", "FAULT"), "division-by-zero")
MADE = ("loops.py", line_of("loops.py", "FAULT IN THE GENERATOR"), "division-by-zero")
ROOT = ("left.py", line_of("left.py", "FAULT IN BACKWARD"), "gradient-singularity")


def run(folder: Path, script: str, *words: str, options: tuple[str, ...] = ()) -> Any:
    guarded = [sys.executable, "-m", "nanguard", "run", "--incidents", "found", *options, "--"]
    return subprocess.run(
        [*guarded, sys.executable, str(SCRIPTS / script), *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def found_in(folder: Path) -> list[dict[str, Any]]:
    """Returns the incidents of a run, in the order in which they were written."""
    paths = sorted((folder / "found").glob("*/incident.json"), key=os.path.getmtime)
    return [json.loads(path.read_text()) for path in paths]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("loops.py", [POOLED, POOLED, MADE]),
        ("left.py", [POOLED, POOLED, ROOT]),
        ("unusual.py", [POOLED, POOLED, POOLED]),
    ],
)
def test_explained_in_place_and_the_run_goes_on_as_if_nobody_had_looked(tmp_path, script, expected):
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    done = run(tmp_path / "one", script)
    untraced = run(tmp_path / "other", script, options=("--no-trace",))
    assert done.returncode == 0, done.stderr
    assert done.stdout == untraced.stdout
    incidents = found_in(tmp_path / "one")
    told = [
        (Path(i["origin"]["file"]).name, i["origin"]["line"], i["cause"]["code"])
        for i in incidents
        for _ in range(i.get("times", 1))
    ]
    assert sorted(told) == sorted(expected), done.stderr
    assert {i["replay"]["method"] for i in incidents} == {"in-place"}
    assert all(any(fix["verified"] for fix in i["fixes"]) for i in incidents)


@pytest.mark.parametrize(
    ("way", "mark", "method", "causes"),
    [
        ("loop", "FAULT IN THE LOOP", "in-place", ("label-out-of-range",)),
        ("dicts", "FAULT WITH THE WEIGHTS", "in-place", ("division-by-zero",)),
        ("mixture", "FAULT OF THE FORMULA", "in-place", ("log-or-sqrt-domain",)),
        ("gradients", "FAULT BY HAND", "in-place", ("division-by-zero",)),
        (
            "prepared",
            "FAULT IN THE PREPARATION",
            "second-run",
            ("degenerate-statistics", "division-by-zero"),
        ),
    ],
)
def test_what_comes_with_the_data(tmp_path, way, mark, method, causes):
    done = run(tmp_path, "data.py", way)
    (incident,) = found_in(tmp_path)
    assert incident["origin"]["line"] == line_of("data.py", mark), done.stderr
    assert incident["cause"]["code"] in causes
    assert incident["replay"]["method"] == method
    if way == "loop":
        (trial,) = [t for t in incident["trials"] if t["what"].startswith("sample 2 of")]
        assert trial["finite"]


@pytest.mark.parametrize("way", ["name", "world"])
def test_data_that_can_be_had_only_once(tmp_path, way):
    for name, options in (("traced", ()), ("other", ("--no-trace",))):
        (tmp_path / name).mkdir()
        done = run(tmp_path / name, "streams.py", way, options=options)
        (tmp_path / name / "stdout").write_text(done.stdout)
    (incident,) = found_in(tmp_path / "traced")
    assert (incident["step"], incident["replay"]["method"]) == (7, "in-place")
    assert (incident["origin"]["line"], incident["cause"]["code"]) == POOLED[1:]
    printed = [(tmp_path / name / "stdout").read_text() for name in ("traced", "other")]
    assert printed[0] == printed[1]


@pytest.mark.parametrize("way", ["in_head", "taken_apart", "by_next", "added_up", "left"])
def test_loss_that_a_generator_hands_on(tmp_path, way):
    printed = []
    for name, options in (("traced", ()), ("other", ("--no-trace",))):
        (tmp_path / name).mkdir()
        printed.append(run(tmp_path / name, "handed.py", way, options=options).stdout)
    (incident,) = found_in(tmp_path / "traced")
    assert (incident["step"], incident["replay"]["method"]) == (7, "in-place")
    assert (incident["origin"]["line"], incident["cause"]["code"]) == POOLED[1:]
    assert any(fix["verified"] for fix in incident["fixes"])
    assert printed[0] == printed[1] != ""


@pytest.mark.parametrize(
    "way", ["summed", "listed", "through_time", "in_object", "gradient", "thrown_away"]
)
def test_loss_that_is_added_up_over_turns(tmp_path, way):
    printed = []
    for name, options in (("traced", ()), ("other", ("--no-trace",))):
        (tmp_path / name).mkdir()
        printed.append(run(tmp_path / name, "carried.py", way, options=options).stdout)
    (incident,) = found_in(tmp_path / "traced")
    assert (incident["step"], incident["replay"]["method"]) == (2, "in-place")
    if way == "gradient":
        assert incident["origin"]["line"] == line_of("carried.py", "FAULT IN BACKWARD")
        assert incident["cause"]["code"] == "gradient-singularity"
    else:
        assert (incident["origin"]["line"], incident["cause"]["code"]) == POOLED[1:]
    assert bool(incident.get("by_script")) is (way == "thrown_away")
    assert any(fix["verified"] for fix in incident["fixes"])
    assert printed[0] == printed[1] != ""


@pytest.mark.parametrize("way", ["raise", "leave", "helper", "attribute", "gradient", "class"])
def test_script_without_a_model_that_ends_itself(tmp_path, way):
    run(tmp_path, "bare.py", way)
    (incident,) = found_in(tmp_path)
    assert incident["by_script"]
    mark = "FAULT IN BACKWARD" if way == "gradient" else "FAULT"
    assert incident["origin"]["line"] == line_of("bare.py", mark)
    cause = "gradient-singularity" if way == "gradient" else "log-or-sqrt-domain"
    assert incident["cause"]["code"] == cause


@pytest.mark.parametrize(
    ("way", "mark", "cause"),
    [
        ("value", "FAULT", "log-or-sqrt-domain"),
        ("each sample", "FAULT", "log-or-sqrt-domain"),
        ("one tensor", "FAULT", "log-or-sqrt-domain"),
        ("gradient", "FAULT IN BACKWARD", "gradient-singularity"),
        ("log", "FAULT IN LOG", "log-or-sqrt-domain"),
    ],
)
def test_gradients_of_torch_func(tmp_path, way, mark, cause):
    done = run(tmp_path, "func.py", way, "7")
    (incident,) = found_in(tmp_path)
    assert (incident["step"], incident["replay"]["method"]) == (7, "in-place"), done.stderr
    assert (incident["origin"]["line"], incident["cause"]["code"]) == (
        line_of("func.py", mark),
        cause,
    )
    assert any(fix["verified"] for fix in incident["fixes"])
    sums = [line.split()[1] for line in done.stdout.splitlines()]
    assert sums[7] == sums[6] != sums[8]
    assert "nan" not in sums


def test_gradients_of_torch_func_that_are_not_the_whole_update(tmp_path):
    done = run(tmp_path, "func.py", "newton", "7", options=("--no-trace",))
    assert "parameter of the script's own is not finite" in done.stderr
    assert "nothing can be put back" in done.stderr
    assert len(found_in(tmp_path)) == 2


@pytest.mark.parametrize("way", ["value", "each sample", "one tensor", "newton", "slope"])
def test_healthy_gradients_of_torch_func_are_left_alone(tmp_path, way):
    words = [sys.executable, str(SCRIPTS / "func.py"), way, "-1"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    plain = subprocess.run(words, capture_output=True, text=True, check=True, env=env)
    done = run(tmp_path, "func.py", way, "-1")
    assert done.stdout == plain.stdout
    assert not found_in(tmp_path)
    assert "of them bad" not in done.stderr


def test_results_that_cannot_be_looked_at_are_counted(tmp_path):
    run(tmp_path, "kinds.py")
    (incident,) = found_in(tmp_path)
    assert incident["origin"]["line"] == line_of("kinds.py", "FAULT")
    assert any("cannot be looked at" in note for note in incident["notes"])


def test_gradients_that_do_not_come_out_the_same_prove_nothing(tmp_path):
    run(tmp_path, "data.py", "gradients", "by chance", options=("--explain-seconds", "1"))
    (incident,) = found_in(tmp_path)
    assert incident["cause"]["code"] == "unknown"
    assert incident["replay"]["why"].startswith("what was replayed is not what ran")


def test_what_is_open_already_is_not_written_to(tmp_path):
    """Files, a pipe, a socket, queues, a pool, a data base, a memory map and a progress bar."""
    for name, options in (("traced", ()), ("other", ("--no-trace",))):
        (tmp_path / name).mkdir()
        done = run(tmp_path / name, "writes.py", options=options)
        assert done.returncode == 0, done.stderr
        (tmp_path / name / "stdout").write_text(done.stdout)
    (incident,) = found_in(tmp_path / "traced")
    assert incident["replay"]["method"] == "in-place"
    assert (Path(incident["origin"]["file"]).name, incident["cause"]["code"]) == POOLED[::2]
    for path in (tmp_path / "other").iterdir():
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "traced" / path.name).read_bytes(), path.name


@pytest.mark.parametrize(
    ("way", "code", "step"),
    [
        ("raise", 1, 7),
        ("raise", 1, 0),
        ("leave", 5, 7),
        ("leave", 5, 0),
        ("quit", 5, 7),
        ("class", 0, 7),
        ("class", 0, 0),
        ("instance", 5, 7),
        ("at once", 5, 7),
        ("break", 0, 7),
    ],
)
def test_script_that_ends_itself(tmp_path, way, code, step):
    done = run(tmp_path, "ends.py", way, *(["at once"] if step == 0 else []))
    assert done.returncode == code
    (incident,) = found_in(tmp_path)
    assert (incident["step"], incident["by_script"]) == (step, True)
    assert incident["origin"]["line"] == POOLED[1]
    assert incident["cause"]["code"] == POOLED[2]
    assert "the script ended itself" in incident["action"]["reason"]


@pytest.mark.parametrize("end", ["read", "raise SystemExit"])
def test_an_infinity_that_is_meant_at_the_end_is_nobodys_business(tmp_path, end):
    done = run(tmp_path, "meant.py", end)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "the end -inf"
    assert not found_in(tmp_path)
    assert "nanguard: step" not in done.stderr
