"""Faults beside the step: in its updates, in what was made before it, in what stays behind."""

from __future__ import annotations

import pytest

from tests.replay.test_forms import found_in, line_of, run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("way", "mark", "cause"),
    [
        ("schedule", "FAULT OF THE SCHEDULE", "optimizer-misuse"),
        ("own", "FAULT OF THE OPTIMIZER", "optimizer-misuse"),
        ("both", "FAULT BEFORE TWO UPDATES", "division-by-zero"),
        ("behind", "FAULT BEHIND THE FIRST", "gradient-singularity"),
    ],
)
def test_bad_updates_are_replayed_and_repaired_in_place(tmp_path, way, mark, cause):
    done = run(tmp_path, "updates.py", way)
    assert done.returncode == 0, done.stderr
    (incident,) = found_in(tmp_path)
    assert incident["origin"]["line"] == line_of("updates.py", mark), done.stderr
    assert incident["cause"]["code"] == cause
    assert incident["replay"]["method"] == "in-place"
    assert incident["fixes"][0]["verified"]
    assert "nan" not in done.stdout


def test_optimizers_that_step_together_are_held_back_together(tmp_path):
    for name, way in (("plain", "both"), ("skipped", "both")):
        (tmp_path / name).mkdir()
        options = () if name == "plain" else ("--no-trace",)
        done = run(tmp_path / name, "updates.py", way, options=options)
        (tmp_path / name / "stdout").write_text(done.stdout)
        assert "24 steps, 1 of them bad" in done.stderr
    texts = [(tmp_path / name / "stdout").read_text() for name in ("plain", "skipped")]
    assert texts[0] == texts[1]


def test_steps_after_a_bad_one_are_made_where_nobody_calls_backward(tmp_path):
    done = run(tmp_path, "updates.py", "asked", options=("--no-trace",))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{step} moved {step != 7}" for step in range(12)]


def test_learning_rate_that_is_not_a_number_never_reaches_the_weights(tmp_path):
    done = run(tmp_path, "updates.py", "schedule", options=("--no-trace",))
    incident = found_in(tmp_path)[0]
    assert incident["symptom"]["where"] == "learning rate"
    assert (incident["step"], incident["action"]["taken"]) == (7, "skip")
    assert "nan" not in done.stdout


def test_optimizer_that_divides_by_zero_at_once(tmp_path):
    done = run(tmp_path, "updates.py", "bare")
    assert done.returncode == 3  # it would go wrong in every step
    (incident,) = found_in(tmp_path)
    assert (incident["step"], incident["replay"]["method"]) == (0, "in-place")
    assert incident["cause"]["code"] == "optimizer-misuse"
    (fix,) = incident["fixes"]
    assert fix["verified"]
    assert "eps=1e-8" in fix["diff"]


@pytest.mark.parametrize(
    ("way", "step", "mark", "name", "cause"),
    [
        ("table", 10, "FAULT OF THE TABLE", "Weighted.weights", "division-by-zero"),
        ("assigned", 8, "FAULT OF THE VARIABLE", "offsets", "log-or-sqrt-domain"),
    ],
)
def test_what_was_made_before_the_step_is_made_again(tmp_path, way, step, mark, name, cause):
    done = run(tmp_path, "kept.py", way)
    (incident,) = found_in(tmp_path)
    assert incident["step"] == step
    assert incident["origin"]["line"] == line_of("kept.py", mark), done.stderr
    assert incident["origin"]["table"] == name
    assert incident["cause"]["code"] == cause
    assert f"{name} has held it since it was made" in done.stderr


def test_what_a_rollout_has_collected_is_made_again(tmp_path):
    done = run(tmp_path, "kept.py", "rollout")
    incident, *_ = found_in(tmp_path)
    assert (incident["step"], incident["replay"]["method"]) == (8, "in-place")
    assert incident["origin"]["line"] == line_of("kept.py", "FAULT OF THE ROLLOUT"), done.stderr
    assert incident["cause"]["code"] == "degenerate-statistics"
    assert any(fix["verified"] for fix in incident["fixes"])
    # The steps after it are made with the same values.
    assert "the same as at step 8" in done.stderr
    (tmp_path / "other").mkdir()
    bare = run(tmp_path / "other", "kept.py", "rollout", options=("--no-trace",))
    assert done.stdout == bare.stdout


def test_data_of_a_stream_is_bad_where_it_is_handed_out(tmp_path):
    run(tmp_path, "kept.py", "stream", options=("--explain-seconds", "1"))
    (incident,) = found_in(tmp_path)
    assert (incident["step"], incident["cause"]["code"]) == (7, "bad-input-data")
    assert incident["origin"]["line"] == line_of("kept.py", "FAULT OF THE STREAM")


def test_statistics_in_plain_attributes_go_back_with_the_step(tmp_path):
    done = run(tmp_path, "kept.py", "attributes")
    (incident,) = found_in(tmp_path)
    assert (incident["step"], incident["cause"]["code"]) == (7, "bad-input-data")
    assert "nan" not in done.stdout
    assert done.stdout.split()[-1] == "88.0"  # of 96 samples, 8 are as if they had never come


def test_what_the_script_sets_before_a_bad_step_stays(tmp_path):
    done = run(tmp_path, "kept.py", "chosen", options=("--no-trace",))
    assert "1 of them bad" in done.stderr
    assert done.stdout.splitlines()[-1] == "by 2.0 88.0"


@pytest.mark.parametrize(
    ("way", "mark"),
    [
        ("lazy", "FAULT OF THE MASK"),
        ("hollow", "FAULT OF THE MASK"),
        ("waiting", "FAULT OF THE COROUTINE"),
    ],
)
def test_nothing_about_the_script_keeps_it_from_being_explained(tmp_path, way, mark):
    done = run(tmp_path, "kept.py", way)
    assert "not guarded any more" not in done.stderr
    (incident,) = found_in(tmp_path)
    assert (incident["step"], incident["replay"]["method"]) == (7, "in-place")
    assert incident["origin"]["line"] == line_of("kept.py", mark)
    assert incident["cause"]["code"] == "division-by-zero"
    assert incident["fixes"][0]["verified"]
