"""Saving and resuming: every stateful part round-trips, also in the middle of an incident."""

from __future__ import annotations

import copy
import io
import pickle
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nanguard import Guard, Settings
from nanguard.errors import SnapshotError, UsageError
from nanguard.guard import rng
from nanguard.guard.policy import Policy, Trouble
from nanguard.guard.rng import RandomStreams
from nanguard.guard.verdicts import Judge, Reading
from nanguard.signals import DriftWatch, ScaleWatch, SpikeWindow
from nanguard.snapshots.disk import from_portable, portable
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


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_random_streams_follows_the_same_streams(copied: Any):
    """It would go on telling what it saw first, whatever is drawn."""
    streams = RandomStreams([])
    streams.capture()
    other = copied(streams)
    torch.rand(3), random.random(), np.random.rand()
    assert rng.same(other.capture(), streams.capture())
    assert rng.same(other.capture(), RandomStreams([]).capture())


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
    torch.rand(3)  # what is drawn before the loop begins does not count
    left_over = count % accumulate
    assert train(second, guard, 3) == order[count - left_over :]
    parameters = [dict(run.model.named_parameters()) for run in (second, whole)]
    assert differences(*parameters) == []


@pytest.mark.parametrize("stop", [4, 5])
def test_a_run_that_dies_twice_within_one_interval(
    tmp_path: Path, stop: int, caplog: pytest.LogCaptureFixture
):
    data = batches(16)
    options = {"snapshot_every": 3, "disk_every": 3, **SETTINGS}
    expected = Run().guarded(data, **options).everything()
    for limit in (stop, stop, None):
        run = Run()
        guard = run.make_guard(run_dir=tmp_path, **options)
        guard.resume()
        for batch in guard.watch(data):
            guard.backward(run.loss(batch))
            guard.step(max_norm=1.0)
            if limit is not None and guard.updates == limit:
                break
        guard.close()
    assert differences(run.everything(), expected) == []
    assert "passed over" not in caplog.text


def resumed(tmp_path: Path, train: Any, build: Any) -> tuple[Any, Any]:
    """Returns how a run ends that was not interrupted, and one that was, from disk."""
    ends = []
    for name, limits in (("whole", [None]), ("resumed", [9, None])):
        for limit in limits:
            seed_all(0 if limit or name == "whole" else 77)
            parts = build()
            settings = Settings(**{**QUIET, "snapshot_every": 5, "disk_every": 5})
            guard = Guard(*parts[:2], **parts[2], run_dir=tmp_path / name, settings=settings)
            if limit is None and name == "resumed":
                assert guard.resume()
            train(guard, *parts[:2], limit)
            guard.close()
        models = parts[0] if isinstance(parts[0], list) else [parts[0]]
        ends.append([{k: v.clone() for k, v in model.state_dict().items()} for model in models])
    return ends[0], ends[1]


def plain_loop(guard: Guard, model: Any, _optimizer: Any, limit: int | None) -> None:
    for x, y in guard.watch(batches(20)):
        guard.backward(F.cross_entropy(model(x), y))
        guard.step()
        torch.rand(3)  # the rest of the body draws, too
        if limit and guard.updates >= limit:
            break


def test_two_steps_for_one_batch_are_never_torn_apart(tmp_path: Path):
    def build() -> Any:
        models = [nn.Linear(8, 4), nn.Linear(8, 4)]
        return models, [torch.optim.Adam(m.parameters(), lr=1e-2) for m in models], {}

    def train(guard: Guard, models: Any, optimizers: Any, limit: int | None) -> None:
        for x, y in guard.watch(batches(20)):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                guard.backward(F.cross_entropy(model(x + torch.randn_like(x)), y))
                guard.step(optimizer)
            if limit and guard.updates >= limit:
                break

    assert differences(*resumed(tmp_path, train, build)) == []


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_memory_formats_survive_a_snapshot(tmp_path: Path, kind: str):
    """Fused optimizers walk memory in order, so their state must lie as the weights do."""

    def build() -> Any:
        layers = nn.Sequential(
            nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2), nn.Flatten(), nn.Linear(4, 4)
        )
        model = layers.to(memory_format=torch.channels_last)
        options = {"AdamW": {}, "SGD": {"momentum": 0.9}}[kind]
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-2, fused=True, **options)
        return model, optimizer, {}

    assert differences(*resumed(tmp_path, plain_loop, build)) == []


@pytest.mark.parametrize("kind", ["lambda", "lr", "milestones", "numpy milestones", "own"])
def test_schedulers_of_every_kind_survive_a_snapshot(tmp_path: Path, kind: str):
    class Own:
        """Keeps a list, as user-made schedulers do."""

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer, self.seen = optimizer, [np.float32(1.0)]

        def step(self) -> None:
            self.seen.append(self.seen[-1] * np.float32(0.97))
            self.optimizer.param_groups[0]["lr"] = float(1e-2 * self.seen[-1])

        def state_dict(self) -> Any:
            return {"seen": self.seen, "pair": (1, 2)}

        def load_state_dict(self, state: Any) -> None:
            assert state["pair"] == (1, 2)
            self.seen = state["seen"]

    def build() -> Any:
        model = Net()
        rate = np.logspace(-2, -1, 4)[0] if kind == "lr" else 1e-2
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        schedulers = torch.optim.lr_scheduler
        scheduler = {
            "lambda": lambda: schedulers.LambdaLR(optimizer, lambda i: 0.5 * (1 + np.cos(i / 20))),
            "lr": lambda: schedulers.StepLR(optimizer, 4),
            "milestones": lambda: schedulers.MultiStepLR(optimizer, [3, 8, 8, 12]),
            "numpy milestones": lambda: schedulers.MultiStepLR(optimizer, np.array([3, 8, 12])),
            "own": lambda: Own(optimizer),
        }[kind]()
        return model, optimizer, {"scheduler": scheduler}

    assert differences(*resumed(tmp_path, plain_loop, build)) == []


def test_a_snapshot_is_not_changed_by_who_was_rolled_back_to_it():
    class Own:
        def __init__(self) -> None:
            self.optimizer, self.seen = None, []

        def step(self) -> None:
            self.seen.append(len(self.seen))

        def state_dict(self) -> Any:
            return {"seen": self.seen}

        def load_state_dict(self, state: Any) -> None:
            self.seen = state["seen"]

    model, scheduler = Net(), Own()
    guard = Guard(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        scheduler=scheduler,
        settings=Settings(on_bad="rollback", snapshot_every=5),
    )
    for x, y in guard.watch(poisoned(batches(16), (7, 9))):
        guard.backward(F.cross_entropy(model(x), y))
        guard.step()
    assert guard.summary().rollbacks == 2
    assert scheduler.seen == list(range(11))


def test_a_plateau_scheduler_cannot_count_steps():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(ValueError, match="cannot be stepped with every update"):
        Guard(model, optimizer, scheduler=scheduler)


def test_taking_a_checkpoint_does_not_change_the_run():
    """A cut learning rate climbs back by the steps, not by when the host looked at them."""

    def train(checkpoints: bool) -> Any:
        run = Run()
        guard = run.make_guard(lag=2, max_skips=0, lr_climb_after=4)
        for batch in guard.watch(poisoned(batches(20), (6,))):
            guard.backward(run.loss(batch))
            guard.step()
            if checkpoints:
                guard.state_dict()
        assert guard.summary().lr_cuts == 1
        return run.everything()

    assert differences(train(checkpoints=True), train(checkpoints=False)) == []


def test_the_mean_loss_of_an_epoch_survives_a_checkpoint(tmp_path: Path):
    rows = []
    for name in ("whole", "resumed"):
        run = Run()
        guard = run.make_guard(run_dir=tmp_path / name)
        for index, batch in enumerate(guard.watch(batches(8))):
            guard.backward(run.loss(batch))
            guard.step()
            if name == "resumed" and index == 3:
                saved = save(run, guard)
                guard = run.make_guard(run_dir=tmp_path / name)
                break
        if name == "resumed":
            load(run, guard, saved)
            for batch in guard.watch(batches(8)):
                guard.backward(run.loss(batch))
                guard.step()
        guard.end_epoch(val_loss=torch.tensor(0.5))
        rows.append((tmp_path / name / "training_history.csv").read_text())
    assert rows[0] == rows[1]
    assert rows[0].strip().endswith(",0.5")


def test_resume_is_refused_inside_of_a_loop(tmp_path: Path):
    run = Run()
    guard = run.make_guard(run_dir=tmp_path, snapshot_every=2, disk_every=2)
    for batch in guard.watch(batches(4)):
        guard.backward(run.loss(batch))
        guard.step()
    before = copy.deepcopy(run.everything())
    for _ in guard.watch(batches(2)):
        with pytest.raises(UsageError, match="inside of a watched loop"):
            guard.resume()
        break
    assert differences(run.everything()["model"], before["model"]) == []


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
    with pytest.raises(SnapshotError, match=r"of another model: missing 0\.bias, 0\.weight"):
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


def test_pythons_stream_is_followed_through_everything_that_moves_it():
    streams = RandomStreams([])
    for move in (
        random.random,
        lambda: random.gauss(0, 1),
        lambda: random.gauss(0, 1),  # uses the number that the one before kept in reserve
        lambda: random.seed(5),
        lambda: random.shuffle(list(range(9))),
        lambda: None,
    ):
        move()
        assert streams.capture()["python"] == random.getstate()


def test_an_average_that_is_made_by_its_first_update(tmp_path: Path):
    class Lazy:
        """Keeps its tensors, and how many updates they have seen, in a dict."""

        def __init__(self) -> None:
            self.shadow: dict[str, Any] = {}
            self.seen = {"updates": 0}

        def update(self, model: nn.Module) -> None:
            self.seen["updates"] += 1
            for name, parameter in model.named_parameters():
                mine = self.shadow.setdefault(name, parameter.detach().clone())
                mine.lerp_(parameter.detach(), 1 / (1 + self.seen["updates"]))

    def build() -> Any:
        model = Net()
        averages.append(Lazy())
        return model, torch.optim.AdamW(model.parameters(), fused=True), {"ema": averages[-1]}

    averages: list[Lazy] = []
    assert differences(*resumed(tmp_path, plain_loop, build)) == []
    assert averages[0].seen == averages[2].seen
    assert differences(averages[0].shadow, averages[2].shadow) == []
    ends = []
    for lag in (0, 2):
        seed_all(0)
        model, optimizer, ema = build()
        guard = Guard(model, optimizer, **ema, settings=Settings(**QUIET, lag=lag))
        for x, y in guard.watch(poisoned(batches(12), (5, 9))):
            guard.backward(F.cross_entropy(model(x), y))
            guard.step()
        ends.append((averages[-1].seen, averages[-1].shadow))
    assert ends[0][0] == {"updates": 10}
    assert differences(*ends) == []


def test_after_a_resume_the_way_back_is_of_the_same_history(tmp_path: Path):
    run = Run()
    options = {"snapshot_every": 4, "disk_every": 8, "on_bad": "rollback"}
    guard = run.make_guard(run_dir=tmp_path, **options)
    for batch in guard.watch(batches(14)):
        guard.backward(run.loss(batch))
        guard.step()
    guard.summary()
    assert guard.resume()
    for batch in guard.watch(poisoned(batches(14), (9,))):
        guard.backward(run.loss(batch))
        guard.step()
        if guard.summary().rollbacks:
            assert guard.updates == 8
            break
    assert guard.summary().rollbacks == 1


def test_a_rollback_does_not_take_back_epochs():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    settings = Settings(on_bad="rollback", snapshot_every=1000)
    guard = Guard(model, optimizer, scheduler=scheduler, scheduler_every="epoch", settings=settings)
    for epoch in range(3):
        for x, y in guard.watch(poisoned(batches(4), (2,) if epoch == 2 else ())):
            guard.backward(F.cross_entropy(model(x), y))
            guard.step()
        guard.end_epoch()
    assert guard.summary().rollbacks == 1
    assert scheduler.last_epoch == 3
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**3


def test_snapshots_wait_until_no_gradients_are_accumulated(tmp_path: Path):
    def build() -> Any:
        models = [nn.Linear(8, 4), nn.Linear(8, 4)]
        return models, [torch.optim.Adam(m.parameters(), lr=1e-2) for m in models], {}

    def train(guard: Guard, models: Any, optimizers: Any, limit: int | None) -> None:
        for index, (x, y) in guard.enumerate(batches(21)):
            guard.backward(F.cross_entropy(models[0](x), y))
            guard.step(optimizers[0])
            guard.backward(F.cross_entropy(models[1](x), y) / 3)
            if (index + 1) % 3 == 0:
                guard.step(optimizers[1])
            if limit and guard.updates >= limit:
                break

    assert differences(*resumed(tmp_path, train, build)) == []


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(1),
        lambda: torch.randn(1),
        lambda: torch.randn(1, dtype=torch.float64),
        lambda: torch.manual_seed(3),
        lambda: torch.randperm(5),
        lambda: np.random.rand(),
        lambda: random.random(),
    ],
)
def test_streams_are_read_again_exactly_if_they_have_moved(draw):
    streams = RandomStreams([])
    seed_all(1)
    torch.randn(1)  # another number may be in reserve now
    before = streams.capture()
    assert streams.capture() is before
    numbers = [draw(), torch.randn(1), np.random.rand(), random.random()][1:]
    assert streams.capture() is not before
    streams.restore(before)
    assert [draw(), torch.randn(1), np.random.rand(), random.random()][1:] == numbers


def test_twister_is_found_under_another_default_device():
    found = rng._place_of_twister()
    rng._place_of_twister.cache_clear()
    with torch.device("meta"):
        assert rng._place_of_twister() == found
