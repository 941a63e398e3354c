"""The smaller parts of the guard: EMA, loss scaling, held tensors, injection."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from nanguard import Guard, Settings
from nanguard.guard.batches import Keeper, arrays_in
from nanguard.guard.held import FixedPlaces, Held
from nanguard.guard.optimizers import can_be_gated, scaled_lr
from nanguard.testing import inject
from tests.training import (
    INF,
    NAN,
    QUIET,
    Net,
    batches,
    differences,
    poisoned,
    seed_all,
    take_step,
    without,
)

# --- EMA -------------------------------------------------------------------------------------


class UpdateWithModel:
    """The shape of timm's ModelEma: ``update(model)``."""

    def __init__(self, model: nn.Module) -> None:
        self.module, self.count = copy.deepcopy(model), 0

    def update(self, model: nn.Module) -> None:
        self.count += 1
        with torch.no_grad():
            for mine, theirs in zip(self.module.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)

    def state(self) -> Any:
        return {"module": self.module.state_dict(), "count": self.count}


class UpdateAlone:
    """The shape of torch_ema: ``update()``, a list of shadows, a counter that sets the decay."""

    def __init__(self, model: nn.Module) -> None:
        self.source = [model]
        self.shadow = [p.detach().clone() for p in model.parameters()]
        self.num_updates = 0

    def update(self, parameters: Any = None) -> None:
        self.num_updates += 1
        decay = min(0.9, (1 + self.num_updates) / (10 + self.num_updates))
        with torch.no_grad():
            for mine, theirs in zip(self.shadow, self.source[0].parameters(), strict=True):
                mine.lerp_(theirs, 1 - decay)

    def state(self) -> Any:
        return {"shadow": self.shadow, "count": self.num_updates}


class StepWithParameters:
    """The shape of diffusers' EMAModel: ``step(parameters)``."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow_params = [p.detach().clone() for p in model.parameters()]
        self.optimization_step = 0

    def step(self, parameters: Any) -> None:
        self.optimization_step += 1
        for mine, theirs in zip(self.shadow_params, list(parameters), strict=True):
            mine.sub_(0.1 * (mine - theirs.detach()))

    def state(self) -> Any:
        return {"shadow": self.shadow_params, "count": self.optimization_step}


class Averaged(AveragedModel):
    """torch's own, with buffers averaged too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=False)

    def state(self) -> Any:
        return self.state_dict()


class Equal(AveragedModel):
    """torch's stochastic weight averaging, which divides by a counter."""

    def state(self) -> Any:
        return self.state_dict()


class Rebinding(UpdateAlone):
    """Makes a new list of new tensors at every update."""

    def update(self, parameters: Any = None) -> None:
        theirs = self.source[0].parameters()
        self.num_updates += 1
        self.shadow = [0.9 * m + 0.1 * t.detach() for m, t in zip(self.shadow, theirs, strict=True)]


class InATuple(UpdateAlone):
    """Keeps its tensors in a tuple, in an object of its own."""

    class Box:
        def __init__(self, tensors: Any) -> None:
            self.tensors = tuple(tensors)

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.box, self.shadow = InATuple.Box(self.shadow), []

    def update(self, parameters: Any = None) -> None:
        with torch.no_grad():
            for mine, theirs in zip(self.box.tensors, self.source[0].parameters(), strict=True):
                mine.lerp_(theirs, 0.1)

    def state(self) -> Any:
        return {"tensors": self.box.tensors}


def test_an_ema_without_tensors_is_refused():
    class Blind:
        def update(self) -> None:
            """Averages nothing."""

    model = Net()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), ema=Blind())
    for x, y in guard.watch(batches(1)):
        guard.backward(F.cross_entropy(model(x), y))
        with pytest.raises(ValueError, match="finds no tensors in the EMA of type Blind"):
            guard.step()


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize(
    "kind",
    [
        *(UpdateWithModel, UpdateAlone, StepWithParameters, Rebinding, InATuple),
        *(Averaged, Equal, tuple),
    ],
)
def test_every_form_of_ema_is_untouched_by_a_bad_step(kind: Any, lag: int):
    data, bad = batches(16), (0, 5, 6, 15)

    def train(data: list[Any], guarded: bool) -> Any:
        seed_all(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        if kind is tuple:
            average = copy.deepcopy(model)

            def update() -> None:
                with torch.no_grad():
                    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.1)

            given, state = (average, update), average.state_dict
        else:
            given = kind(model)
            state = given.state
            update = {
                UpdateWithModel: lambda: given.update(model),
                **dict.fromkeys((UpdateAlone, Rebinding, InATuple), lambda: given.update()),
                StepWithParameters: lambda: given.step(model.parameters()),
            }.get(kind, lambda: given.update_parameters(model))
        guard = None
        if guarded:
            guard = Guard(model, optimizer, ema=given, settings=Settings(**QUIET, lag=lag))
        for x, y in guard.watch(data) if guard else data:
            loss = F.cross_entropy(model(x), y)
            take_step(guard, optimizer, loss)
            if guard is None:
                update()
        return copy.deepcopy(state())

    expected = train(without(data, bad), guarded=False)
    assert differences(train(poisoned(data, bad), guarded=True), expected) == []


# --- GradScaler ------------------------------------------------------------------------------


def train_scaled(data: list[Any], *, guarded: bool, fused: bool, lag: int, init: float) -> Any:
    seed_all(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=init, growth_interval=3)
    guard = None
    if guarded:
        guard = Guard(model, optimizer, scaler=scaler, settings=Settings(**QUIET, lag=lag))
    for x, y in guard.watch(data) if guard else data:
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
            loss = F.cross_entropy(out.float(), y)
        if guard:
            guard.backward(loss)
            guard.step(max_norm=1.0)
            continue
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
    }, guard


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("fused", [True, False])
def test_a_bad_first_step_leaves_a_scaler_as_new(fused: bool, lag: int):
    data = batches(12)
    options = {"fused": fused, "lag": lag, "init": 2.0**8}
    expected, _ = train_scaled(data[1:], guarded=False, **options)
    got, guard = train_scaled(poisoned(data, [0]), guarded=True, **options)
    assert differences(got, expected) == []
    assert guard.summary().overflows == 0


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("fused", [True, False])
def test_an_overflow_is_the_scalers_own_business_and_a_nan_loss_is_not(fused: bool, lag: int):
    data, bad = batches(20), (0, 6, 7, 13)
    options = {"fused": fused, "lag": lag, "init": 2.0**20}
    expected, _ = train_scaled(without(data, bad), guarded=False, **options)
    got, guard = train_scaled(poisoned(data, bad), guarded=True, **options)
    assert differences(got, expected) == []
    summary = guard.summary()
    assert summary.skipped == len(bad)
    assert summary.overflows > 0
    assert {event.finding.name for event in summary.events} == {"non-finite-loss"}


def test_an_overflow_at_a_scale_of_one_is_an_incident():
    model = Net()
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=1000)
    guard = Guard(
        model, torch.optim.AdamW(model.parameters()), scaler=scaler, settings=Settings(**QUIET)
    )
    with inject(guard, "nan", into="gradient", step=2, parameter="last.weight"):
        for x, y in guard.watch(batches(5)):
            guard.backward(F.cross_entropy(model(x), y))
            guard.step()
    (event,) = guard.summary().events
    assert event.finding.name == "non-finite-gradient"
    assert scaler.get_scale() == 1.0


def test_a_scale_that_keeps_falling_is_warned_about_before_it_is_an_incident():
    model = Net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    guard = Guard(
        model, torch.optim.AdamW(model.parameters()), scaler=scaler, settings=Settings(**QUIET)
    )
    with inject(guard, "inf", into="gradient", step=range(25, 35), parameter="last.weight"):
        for x, y in guard.watch(batches(36)):
            guard.backward(F.cross_entropy(model(x), y))
            guard.step()
    names = [event.finding.name for event in guard.summary().events]
    assert names == ["falling-loss-scale"]
    assert guard.summary().overflows == 10


def test_the_users_own_unscale_is_not_done_twice():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    guard = Guard(model, optimizer, scaler=scaler, settings=Settings(**QUIET))
    for x, y in guard.watch(batches(3)):
        guard.backward(F.cross_entropy(model(x), y))
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        guard.step(grad_norm=norm)
    assert guard.summary().applied == 3


def test_a_disabled_scaler_is_no_scaler():
    model = Net()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    guard = Guard(model, torch.optim.AdamW(model.parameters()), scaler=scaler)
    for x, y in guard.watch(poisoned(batches(4), (2,))):
        guard.backward(F.cross_entropy(model(x), y))
        guard.step()
    assert guard.summary().skipped == 1


# --- optimizers that can be gated ------------------------------------------------------------


def test_which_optimizers_can_be_gated():
    class Own(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            super().step()

    model = Net()
    parameters = list(model.parameters())
    fused = torch.optim.AdamW(parameters, fused=True)
    assert not can_be_gated(fused), "not before its first step"
    for optimizer, gated in [
        (fused, True),
        (torch.optim.AdamW(parameters, foreach=True), False),
        (Own(parameters, fused=True), False),
        (torch.optim.SGD(parameters, lr=0.1, fused=True), True),
        (torch.optim.RMSprop(parameters), False),
    ]:
        model(batches(1)[0][0]).sum().backward()
        optimizer.step()
        assert can_be_gated(optimizer) == gated, optimizer


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_step_that_was_replaced_on_the_instance_cannot_be_gated(scheduled: bool):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if scheduled:
        torch.optim.lr_scheduler.StepLR(optimizer, 10)  # wraps optimizer.step, which is harmless
    model(batches(1)[0][0]).sum().backward()
    optimizer.step()
    assert can_be_gated(optimizer)
    original = optimizer.step
    optimizer.step = lambda closure=None: original(closure)
    assert not can_be_gated(optimizer)


def test_parameters_that_are_swapped_for_as_many_others_are_judged():
    first, second = nn.Linear(8, 4), nn.Linear(8, 4)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    guard = Guard([first, second], optimizer, settings=Settings(**QUIET))
    for index, (x, y) in enumerate(guard.watch(batches(8))):
        if index == 3:
            optimizer.param_groups[0]["params"] = list(second.parameters())
        loss = F.cross_entropy((first if index < 3 else second)(x), y)
        if index == 5:
            second.weight.register_hook(lambda grad: grad * NAN)
        guard.backward(loss)
        guard.step(max_norm=1.0)
    assert guard.summary().skipped == 3
    assert bool(torch.isfinite(second.weight).all())


def test_another_optimizer_is_refused():
    model = Net()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in guard.watch(batches(1)):
        guard.backward(F.cross_entropy(model(x), y))
        with pytest.raises(ValueError, match="SGD is not one of the guard's 1 optimizers"):
            guard.step(other)


def test_a_norm_given_as_a_number():
    model = Net()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), settings=Settings(**QUIET))
    for norm, (x, y) in zip([1.0, NAN, 2.0], guard.watch(batches(3)), strict=True):
        guard.backward(F.cross_entropy(model(x), y))
        guard.step(grad_norm=norm)
    assert guard.summary().skipped == 1


# --- held tensors ----------------------------------------------------------------------------


@pytest.mark.parametrize("latch", [0.0, 1.0])
def test_held_tensors_follow_the_latch(latch: float):
    box: dict[str, Any] = {
        "float": torch.arange(4.0),
        "bool": torch.tensor([True, False]),
        "count": torch.tensor(7),
        "half": torch.ones(2, 3, dtype=torch.float16),
        "nothing": None,
    }
    held = Held(FixedPlaces(lambda: [(box, key) for key in box]))
    held.mark()
    shape = held.shape
    before = {key: None if value is None else value.clone() for key, value in box.items()}
    for key, bad in [("float", NAN), ("half", INF), ("count", 99), ("bool", True)]:
        box[key].fill_(bad)
    after = {key: None if value is None else value.clone() for key, value in box.items()}
    held.restore_if(torch.tensor(latch))
    expected = before if latch else after
    assert all(
        torch.equal(box[key].nan_to_num(), expected[key].nan_to_num())
        for key in ("float", "half", "count")
    )
    assert torch.equal(box["bool"], expected["bool"])
    box["float"], box["nothing"] = torch.zeros(9), torch.zeros(1)
    held.restore(shape)
    assert box["nothing"] is None
    assert (
        differences(
            {k: v for k, v in box.items() if v is not None},
            {k: v for k, v in before.items() if v is not None},
        )
        == []
    )


def test_held_tensors_in_many_chunks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("nanguard.guard.held._CHUNK", 5)
    box = {i: torch.full((i,), float(i)) for i in range(1, 9)}
    held = Held(FixedPlaces(lambda: [(box, key) for key in box]))
    held.mark()
    for tensor in box.values():
        tensor.fill_(NAN)
    held.restore_if(torch.ones(()))
    assert all(torch.equal(t, torch.full((i,), float(i))) for i, t in box.items())


# --- batches ---------------------------------------------------------------------------------


def test_what_a_batch_holds_is_found_at_any_depth_but_not_beyond():
    x = torch.ones(1)
    deep: Any = x
    for _ in range(6):
        deep = [deep]
    assert len(arrays_in({"a": deep, "b": (x, {"c": x})})) == 3
    cyclic: list[Any] = [x]
    cyclic.append(cyclic)
    assert len(arrays_in(cyclic)) <= 8


def test_a_keeper_stops_copying_when_a_loader_gives_new_memory():
    keeper = Keeper(trial=3)
    copied = [keeper.keep(torch.ones(3), []).copied for _ in range(5)]
    assert copied == [True, True, True, False, False]


def test_numpy_batches_come_again_as_they_were():
    rng = np.random.default_rng(0)
    data = [rng.normal(size=(16, 8)).astype("float32") for _ in range(12)]
    ends = []
    for lag in (0, 2):
        seed_all(0)
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        guard = Guard(model, optimizer, settings=Settings(**QUIET, lag=lag))
        for index, x in guard.enumerate([x.copy() for x in data]):
            x *= 3.0  # in place, and past torch
            guard.backward(model(torch.from_numpy(x)).pow(2).mean() * (NAN if index == 7 else 1))
            guard.step()
        ends.append(model.weight.detach().clone())
    assert torch.equal(*ends)


def test_a_reference_that_was_overwritten_is_stale():
    keeper = Keeper(trial=0)
    buffer = torch.ones(3)
    kept = keeper.keep(buffer, [])
    buffer.fill_(2)
    again = keeper.keep(buffer, [kept])
    assert kept.stale
    assert again.copied
    assert keeper.reason == "the loader writes batches into memory that it uses again"


# --- injection -------------------------------------------------------------------------------


@pytest.mark.parametrize("into", ["input", "loss", "gradient"])
def test_injecting_into_a_run_without_a_guard(into: Any):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with inject(model, "nan", into=into, step=2) as injection:
        for index, (x, y) in enumerate(batches(4)):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            broken = any(not bool(torch.isfinite(p.grad).all()) for p in model.parameters())
            assert broken == (index >= 2)
            optimizer.step()
    assert injection.fired == 1


def test_injecting_into_a_tensor_of_any_layout():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(2))
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    model(x)
    with inject(model, "nan", into="input", step=0):
        assert not bool(torch.isfinite(model(x)).all())


def test_injecting_into_tokens_says_what_to_do():
    model = nn.Embedding(4, 2)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with (
        inject(guard, "nan", into="input", step=0),
        pytest.raises(ValueError, match="no floating-point tensor"),
    ):
        for ids in guard.watch([torch.tensor([1])]):
            guard.backward(model(ids).sum())


def test_evaluation_is_not_spoilt():
    model = Net().eval()
    with inject(model, "nan", into="input", step=0) as injection:
        assert bool(torch.isfinite(model(batches(1)[0][0])).all())
    assert injection.fired == 0


def test_rate_that_an_optimizer_finds_by_itself_is_left_alone():
    one, other = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [one], "lr": 0.5}, {"params": [other]}], lr=1.0)
    optimizer.param_groups[1]["lr"] = None
    with scaled_lr([optimizer], 0.5):
        assert [group["lr"] for group in optimizer.param_groups] == [0.25, None]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, None]


class Lookahead(torch.optim.Optimizer):
    """Keeps another optimizer inside."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.optimizer, self.param_groups = inner, inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def test_schedule_of_an_optimizer_with_another_one_inside_is_stepped():
    model = nn.Linear(2, 1)
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=1.0))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with Guard(model, optimizer, scheduler=schedule) as guard:
        for _ in range(3):
            guard.backward(model(torch.ones(4, 2)).square().mean())
            guard.step()
    assert schedule.get_last_lr() == [0.125]
