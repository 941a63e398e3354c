"""Saving and resuming: every stateful part round-trips, also in the middle of an incident."""

from __future__ import annotations

import copy
import io
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nanguard import Guard, Settings
from nanguard.errors import SnapshotError, UsageError
from nanguard.guard.judge import Judge, Reading
from nanguard.guard.policy import Policy, Trouble
from nanguard.guard.rng import RandomStreams, from_portable, portable
from nanguard.guard.spikes import DriftWatch, ScaleWatch, SpikeWindow
from tests.training import QUIET, Net, Run, batches, differences, poisoned, seed_all

if TYPE_CHECKING:
    from pathlib import Path


def through_a_file(state: Any) -> Any:
    """Returns a state as it comes back from a file, without any code being run."""
    memory = io.BytesIO()
    torch.save(state, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=True)


def feed_judge(judge: Judge, values: list[float]) -> list[Any]:
    seen = []
    for step, value in enumerate(values):
        limits = judge.limits(1)
        reading = Reading(False, value, abs(value) + 0.1, {}, scale=2.0 ** (20 - step % 21))
        seen.append((limits, [f.message for f in judge.accept(reading, limits, step)]))
    return seen


STATEFUL: dict[str, tuple[Any, Any]] = {
    "spike window": (
        lambda: SpikeWindow(size=32, warmup=16, warn=6, act=12),
        lambda w, vs: [(w.limits(), w.accept(v)) for v in vs],
    ),
    "drift watch": (lambda: DriftWatch(block=4), lambda w, vs: [w.accept(v) for v in vs]),
    "scale watch": (
        lambda: ScaleWatch(calm=3),
        lambda w, vs: [w.accept(2.0 ** round(v)) for v in vs],
    ),
    "policy": (
        lambda: Policy(Settings(max_skips=1, recent=5, lr_climb_after=2)),
        lambda p, vs: [
            p.good() if v > 0 else p.bad(Trouble(i)).action.value for i, v in enumerate(vs)
        ],
    ),
    "judge": (
        lambda: Judge(Settings(spike_window=16, spike_warmup=16), 2, adversarial=False),
        feed_judge,
    ),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_every_stateful_part_goes_on_where_its_state_was_taken(name: str):
    make, play = STATEFUL[name]
    rng = random.Random(3)
    values = [rng.gauss(0.5, 2) for _ in range(90)]
    for cut in (0, 1, 15, 16, 17, 50, 90):
        whole, first, second = make(), make(), make()
        # Steps are numbered from the start of each part, so both halves are played the same way.
        expected = play(whole, values[:cut]) + play(whole, values[cut:])
        got = play(first, values[:cut])
        second.load_state_dict(through_a_file(first.state_dict()))
        assert got + play(second, values[cut:]) == expected, cut


@pytest.mark.parametrize("lag", [1, 2, 5])
def test_limits_depend_on_the_step_and_not_on_how_much_of_it_the_host_has_seen(lag: int):
    """After a rewind the host knows more than it did in the run that had nothing to rewind."""
    settings = Settings(spike_window=16, spike_warmup=16)
    rng = random.Random(1)
    values = [rng.gauss(2, 0.1) for _ in range(60)]
    usual = Judge(settings, lag, adversarial=False)
    rewound = Judge(settings, lag, adversarial=False)
    for step, value in enumerate(values):
        if step >= lag:
            assert usual.limits(ahead=lag) == rewound.limits(ahead=0), step
            reading = Reading(False, values[step - lag], 1.0, {})
            usual.accept(reading, usual.limits(ahead=lag), step)
        rewound.accept(Reading(False, value, 1.0, {}), rewound.limits(ahead=0), step)


def test_random_streams_survive_a_file():
    own = (torch.Generator().manual_seed(1), random.Random(2), np.random.default_rng(3))
    streams = RandomStreams([], own)
    seed_all(5)
    np.random.randn()  # leaves a normal number in reserve
    state = portable(streams.capture())

    def draw() -> list[Any]:
        return [
            float(torch.rand(())),
            random.random(),
            float(np.random.randn()),
            float(torch.rand((), generator=own[0])),
            own[1].random(),
            float(own[2].random()),
        ]

    expected = draw()
    streams.restore(from_portable(through_a_file(state)))
    assert draw() == expected


def test_a_normal_number_in_reserve_that_is_used_up_is_noticed():
    streams = RandomStreams([])
    np.random.seed(0)
    np.random.randn()
    first = streams.capture()
    np.random.randn()  # uses the reserve: the generator itself does not move
    second = streams.capture()
    assert (first["numpy"]["has_gauss"], second["numpy"]["has_gauss"]) == (1, 0)


def save(run: Run, guard: Guard) -> Any:
    return through_a_file(
        copy.deepcopy(
            {
                "model": run.model.state_dict(),
                "optimizer": run.optimizer.state_dict(),
                "scheduler": run.scheduler.state_dict(),
                "ema": run.ema.state_dict(),
                "guard": guard.state_dict(),
            }
        )
    )


def load(run: Run, guard: Guard, saved: Any) -> None:
    run.model.load_state_dict(saved["model"])
    run.optimizer.load_state_dict(saved["optimizer"])
    run.scheduler.load_state_dict(saved["scheduler"])
    run.ema.load_state_dict(saved["ema"])
    guard.load_state_dict(saved["guard"])


BAD = (0, 5, 6, 14)
SETTINGS = {"spike_warmup": 16, "spike_window": 16}


def loader(data: list[Any]) -> Any:
    return torch.utils.data.DataLoader(data, batch_size=None, shuffle=True)


@pytest.mark.parametrize("lag", [0, 1, 2, 4])
@pytest.mark.parametrize("at", [0, 4, 5, 6, 7, 8, 14, 15, 19])
def test_a_checkpoint_taken_at_any_moment_resumes_bit_identically(at: int, lag: int):
    """Moments 5 to 8 lie in the middle of an incident that a late host has not seen yet."""
    data = poisoned(batches(20), BAD)
    order = list(torch.utils.data.RandomSampler(data, generator=torch.Generator().manual_seed(7)))
    shuffled = [data[i] for i in order]

    whole = Run().guarded(shuffled, lag=lag, **SETTINGS)
    expected = whole.everything()

    first = Run()
    guard = first.make_guard(lag=lag, **SETTINGS)
    saved = None
    for index, batch in enumerate(guard.watch(shuffled)):
        guard.backward(first.loss(batch))
        guard.step(max_norm=1.0)
        if index == at:
            saved = save(first, guard)
            break
    second = Run()
    guard = second.make_guard(lag=lag, **SETTINGS)
    load(second, guard, saved)
    seed_all(99)
    guard.load_state_dict(saved["guard"])
    for batch in guard.watch(shuffled):
        guard.backward(second.loss(batch))
        guard.step(max_norm=1.0)
    assert differences(second.everything(), expected) == []
    assert guard.summary().counts() == {
        **whole.guard.summary().counts(),
        "rerun": guard.summary().rerun,
    }


def test_a_checkpoint_taken_after_a_bad_step_in_the_same_body():
    """The body goes on drawing random numbers after the bad step; they do not count."""
    data = poisoned(batches(10), (4,))
    whole = Run()
    guard = whole.make_guard()
    for batch in guard.watch(data):
        guard.backward(whole.loss(batch))
        guard.step(max_norm=1.0)
        torch.rand(3)
    expected = whole.everything()
    first = Run()
    guard = first.make_guard()
    for index, batch in enumerate(guard.watch(data)):
        guard.backward(first.loss(batch))
        guard.step(max_norm=1.0)
        torch.rand(3)
        if index == 4:
            saved = save(first, guard)
            break
    second = Run()
    guard = second.make_guard()
    load(second, guard, saved)
    for batch in guard.watch(data):
        guard.backward(second.loss(batch))
        guard.step(max_norm=1.0)
        torch.rand(3)
    assert differences(second.everything(), expected) == []


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("stop", [3, 7, 22, 31])
def test_resuming_from_disk_in_any_epoch_repeats_the_shuffle(tmp_path: Path, stop: int, lag: int):
    data = poisoned(batches(12), (4,))
    options = {"lag": lag, "snapshot_every": 3, "disk_every": 3, **SETTINGS}

    def train(run: Run, guard: Guard, limit: int | None) -> None:
        for _ in range(guard.epoch, 3):
            for batch in guard.watch(loader(data)):
                guard.backward(run.loss(batch))
                guard.step(max_norm=1.0)
                if limit is not None and guard.updates >= limit:
                    return
            guard.end_epoch()

    whole = Run()
    train(whole, whole.make_guard(run_dir=tmp_path / "whole", **options), None)
    expected = whole.everything()

    first = Run()
    guard = first.make_guard(run_dir=tmp_path / "run", **options)
    train(first, guard, stop)
    guard.close()
    second = Run()
    seed_all(1234)
    guard = second.make_guard(run_dir=tmp_path / "run", **options)
    assert guard.resume()
    assert 0 < guard.updates <= stop  # a disk that is too slow misses one, and says so
    assert guard.updates % 3 == 0
    train(second, guard, None)
    guard.close()
    assert differences(second.everything(), expected) == []


@pytest.mark.parametrize("count", [12, 10])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_checkpoint_taken_between_epochs_repeats_the_shuffle(count: int, accumulate: int):
    """With 10 batches in threes, one is left over: its step ends in the next epoch."""
    data = batches(count)

    def train(run: Run, guard: Guard, epochs: int) -> list[float]:
        seen = []
        for _ in range(guard.epoch, epochs):
            for index, batch in guard.enumerate(loader(data)):
                seen.append(float(batch[0][0, 0]))
                guard.backward(run.loss(batch))
                if (index + 1) % accumulate == 0:
                    guard.step(max_norm=1.0)
        return seen

    whole = Run(accumulate=accumulate)
    order = train(whole, whole.make_guard(**SETTINGS), 3)
    first = Run(accumulate=accumulate)
    guard = first.make_guard(**SETTINGS)
    train(first, guard, 1)
    saved = save(first, guard)
    second = Run(accumulate=accumulate)
    guard = second.make_guard(**SETTINGS)
    load(second, guard, saved)
    left_over = count % accumulate
    assert train(second, guard, 3) == order[count - left_over :]
    parameters = [dict(run.model.named_parameters()) for run in (second, whole)]
    assert differences(*parameters) == []


def test_resume_without_a_snapshot_starts_from_the_beginning(tmp_path: Path):
    run = Run()
    guard = run.make_guard(run_dir=tmp_path)
    assert guard.resume() is False
    assert guard.epoch == 0


def test_a_snapshot_of_another_model_is_refused_and_changes_nothing(tmp_path: Path):
    run = Run()
    guard = run.make_guard(run_dir=tmp_path, disk_every=2, snapshot_every=2)
    for batch in guard.watch(batches(4)):
        guard.backward(run.loss(batch))
        guard.step()
    guard.close()
    other = nn.Sequential(nn.Linear(8, 4))
    before = copy.deepcopy(other.state_dict())
    optimizer = torch.optim.AdamW(other.parameters())
    guard = Guard(other, optimizer, run_dir=tmp_path, settings=Settings(**QUIET))
    with pytest.raises(
        SnapshotError, match=r"of another model: parameters missing 0\.bias, 0\.weight"
    ):
        guard.resume()
    assert differences(other.state_dict(), before) == []


def test_state_cannot_be_loaded_inside_of_a_watched_loop():
    run = Run()
    guard = run.make_guard()
    state = guard.state_dict()
    with pytest.raises(UsageError, match="inside of a watched loop"):
        for _ in guard.watch(batches(1)):
            guard.load_state_dict(state)


def test_resuming_with_less_data_is_an_error():
    run = Run()
    guard = run.make_guard()
    for index, batch in enumerate(guard.watch(batches(8))):
        guard.backward(run.loss(batch))
        guard.step()
        if index == 5:
            state = guard.state_dict()
    other = Run()
    guard = other.make_guard()
    guard.load_state_dict(state)
    with pytest.raises(UsageError, match="ended after 2 batches, before batch 6"):
        next(iter(guard.watch(batches(2))))


def test_a_plateau_scheduler_counts_epochs(tmp_path: Path):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    guard = Guard(model, optimizer, scheduler=plateau, scheduler_every="epoch", run_dir=tmp_path)
    for val_loss in (1.0, 2.0):
        for x, y in guard.watch(batches(3)):
            guard.backward(F.cross_entropy(model(x), y))
            guard.step()
        guard.end_epoch(val_loss=val_loss, val_acc=0.5)
    guard.close()
    assert optimizer.param_groups[0]["lr"] == 0.1
    lines = (tmp_path / "training_history.csv").read_text().splitlines()
    assert lines[0] == "epoch,train_loss,val_loss,val_acc"
    assert [line.split(",")[0] for line in lines[1:]] == ["1", "2"]
