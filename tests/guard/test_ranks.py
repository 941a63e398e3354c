"""Two ranks, one of them bad: the same decision on both, and nobody waits for ever."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import came_to_its_end

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
LIMIT = 150

FAULTS = [
    f"{fault} in {into}, {label}"
    for label in ("lag 0, fused", "lag 2, fused", "lag 2, foreach")
    for fault in ("nan", "inf", "-inf")
    for into in ("input", "loss", "gradient")
]
SPIKES = [f"spike in loss, {label}" for label in ("lag 0, fused", "lag 2, fused", "lag 2, foreach")]
FORMS = ["ddp", "fsdp"]


@functools.cache
def results(form: str) -> dict[str, Any]:
    """Runs all scenarios of a form once; a hang is a failure, not a wait."""
    out = Path(tempfile.mkdtemp()) / "results.json"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"),
        *("-m", "tests.guard.rank_scenarios", form, str(out)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output = process.communicate()[0]
        pytest.fail(f"the ranks did not come to an end within {LIMIT} s\n{output[-3000:]}")
    assert came_to_its_end(process.returncode, output), output[-3000:]
    return json.loads(out.read_text())


def of(form: str, name: str) -> list[dict[str, Any]]:
    """Returns what each rank has to say about a scenario."""
    both = results(form)[name]
    for rank in both:
        assert "error" not in rank, rank["error"]
    return both


def assert_identical(both: list[dict[str, Any]], left: str, right: str) -> None:
    digests = {rank[side]["digest"] for rank in both for side in (left, right)}
    assert len(digests) == 1, "weights or optimizer state differ"
    for rank in both:
        assert rank[left]["own"] == rank[right]["own"], "buffers or random streams differ"


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("form", FORMS)
def test_one_bad_rank_voids_the_step_on_all(form: str, name: str):
    both = of(form, name)
    assert_identical(both, "bad", "clean")
    for rank in both:
        assert rank["bad"]["skipped"] == 2
        assert rank["bad"]["steps_of_events"] == [3, 9]
    if "gradient" not in name:
        assert both[0]["bad"]["bad_ranks"] == both[1]["bad"]["bad_ranks"] == [1, 1]


@pytest.mark.parametrize("name", SPIKES)
@pytest.mark.parametrize("form", FORMS)
def test_a_spike_on_one_rank_is_skipped_by_all(form: str, name: str):
    both = of(form, name)
    assert_identical(both, "bad", "clean")
    for rank in both:
        assert rank["bad"]["events"] == ["loss-spike"]
        assert rank["bad"]["bad_ranks"] == [1]


@pytest.mark.parametrize("name", ["bad first and last step", "accumulation"])
@pytest.mark.parametrize("form", FORMS)
def test_first_last_and_accumulated_steps(form: str, name: str):
    both = of(form, name)
    assert_identical(both, "bad", "clean")
    assert [rank["bad"]["skipped"] for rank in both] == [2, 2]


@pytest.mark.parametrize("form", FORMS)
def test_a_bad_loss_with_a_good_gradient_is_known_to_all_ranks(form: str):
    both = of(form, "loss bad, gradient good")
    assert_identical(both, "bad", "clean")
    assert [rank["bad"]["messages"] for rank in both] == [["rank 1: the loss is inf"]] * 2


@pytest.mark.parametrize("form", FORMS)
def test_parameters_that_turn_bad_are_rolled_back_on_all_ranks(form: str):
    both = of(form, "parameter after step")
    for rank in both:
        assert rank["finite"]
        assert rank["events"] == ["non-finite-parameter"]
        assert rank["steps_of_events"] == [7]
        assert rank["rollbacks"] == 1
    assert both[0]["digest"] == both[1]["digest"]


@pytest.mark.parametrize("form", FORMS)
def test_all_ranks_stop_together(form: str):
    both = of(form, "stop")
    assert [rank["stopped"] for rank in both] == ["non-finite-loss"] * 2
    assert both[0]["digest"] == both[1]["digest"]


@pytest.mark.parametrize("form", FORMS)
def test_all_ranks_roll_back_together(form: str):
    both = of(form, "rollback")
    for rank in both:
        assert (rank["rollbacks"], rank["lost_updates"]) == (1, 3)
    assert both[0]["digest"] == both[1]["digest"]


@pytest.mark.parametrize("name", ["uneven, sized", "uneven, unsized"])
@pytest.mark.parametrize("form", FORMS)
def test_uneven_ranks_end_together(form: str, name: str):
    first, second = of(form, name)
    assert (first["applied"], second["applied"]) == (9, 9)
    assert (first["skipped"], second["skipped"]) == (1, 1)
    assert first["digest"] == second["digest"]
    assert "uneven-ranks" not in first["events"]
    assert "uneven-ranks" in second["events"]


@pytest.mark.parametrize("form", FORMS)
def test_an_uneven_last_batch(form: str):
    both = of(form, "uneven last batch size")
    assert [rank["applied"] for rank in both] == [7, 7]
    assert both[0]["digest"] == both[1]["digest"]


@pytest.mark.parametrize("form", FORMS)
def test_a_resumed_run_ends_like_the_one_that_was_never_left(form: str):
    both = of(form, "resume from disk")
    assert_identical(both, "whole", "resumed")
    assert all(rank["resumed"]["resumed"] for rank in both)


@pytest.mark.parametrize("form", FORMS)
def test_ranks_only_go_back_to_what_all_of_them_have(form: str):
    both = of(form, "no memory on one rank")
    assert [rank["stopped"] for rank in both] == ["non-finite-loss"] * 2
    assert [rank["rollbacks"] for rank in both] == [0, 0]


def test_poison_in_the_shard_of_one_rank_is_never_written_by_any():
    both = of("fsdp", "poison on one shard")
    for rank in both:
        assert "snapshot-not-finite" in rank["events"]
        assert [name[-8:] for name in rank["written"]] == ["update-2", "update-4"]
        assert rank["rollbacks"] == 1
    assert both[0]["events"] == both[1]["events"]
    assert both[0]["digest"] == both[1]["digest"]


def test_a_checkpoint_taken_on_one_rank_alone_changes_nothing():
    for rank in of("other", "state on one rank"):
        assert rank["lr_cuts"] == 1
        assert rank["same"]


def test_a_plateau_scheduler_hears_the_same_on_every_rank():
    both = of("other", "plateau")
    assert both[0]["lr"] == both[1]["lr"] < 1e-2


def test_ranks_that_see_different_folders_are_told_so():
    for rank in of("other", "folders of their own"):
        assert "the ranks found those of updates [4, None]" in rank["told"]


def test_with_a_grad_scaler_the_ranks_agree_too():
    both = of("other", "grad scaler")
    assert_identical(both, "bad", "clean")
    for rank in both:
        assert rank["bad"]["skipped"] == 2
        assert rank["bad"]["scale"] == rank["clean"]["scale"]


def test_a_model_without_a_wrapper_is_asked_about_on_every_rank():
    both = of("other", "plain model")
    assert_identical(both, "bad", "clean")
    assert [rank["bad"]["skipped"] for rank in both] == [1, 1]
