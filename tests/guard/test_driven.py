"""A loop that somebody else owns: told what happens, the guard keeps bad steps from happening."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nanguard import NonFiniteError, Settings
from nanguard.guard.driven import Driven
from nanguard.testing import inject
from tests.training import INF, NAN, Net, batches, differences, poisoned, seed_all, without

QUIET = Settings(max_skips=20, snapshot_every=0, spike_warmup=16, spike_window=16)


class Framework:
    """A training loop with a life of its own, which calls a few hooks."""

    def __init__(
        self,
        *,
        accumulate: int = 1,
        closure: bool = False,
        scaler: Any = None,
        unscale: bool = False,
    ) -> None:
        seed_all(0)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.9)
        self.accumulate, self.closure = accumulate, closure
        self.scaler, self.unscale = scaler, unscale
        self.driven: Driven | None = None

    def guard(self, settings: Settings = QUIET, **options: Any) -> Framework:
        self.driven = Driven(
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            settings=settings,
            **options,
        )
        return self

    def fit(self, data: list[Any]) -> Framework:
        try:
            for index, batch in enumerate(data):
                if self.driven is not None:
                    self.driven.begin_batch(batch)
                if (index + 1) % self.accumulate:
                    self._go_back(batch)
                else:
                    self._step(batch)
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                if self.driven is not None:
                    self.driven.end_batch()
        finally:
            if self.driven is not None:
                self.driven.close()
        return self

    def _go_back(self, batch: Any) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self.model(x + 1e-3 * torch.randn_like(x)), y) / self.accumulate
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        if self.driven is not None:
            self.driven.saw_loss(scaled, scaled=True)
        scaled.backward()
        return loss

    def _clip(self) -> None:
        if self.unscale:
            self.scaler.unscale_(self.optimizer)
        if self.driven is not None:
            self.driven.judge()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def _step(self, batch: Any) -> None:
        if self.closure:
            self.optimizer.step(lambda: (self._go_back(batch), self._clip())[0])
            return
        self._go_back(batch)
        self._clip()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def everything(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "torch": torch.get_rng_state(),
        }


def scaler() -> Any:
    return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)


SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "closure": {"closure": True},
    "accumulated": {"accumulate": 2},
    "scaled": {"scaler": True},
    "scaled and unscaled before it is judged": {"scaler": True, "unscale": True},
}


def made(shape: str) -> Framework:
    given = dict(SHAPES[shape])
    if given.pop("scaler", False):
        given["scaler"] = scaler()
    return Framework(**given)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_bad_batch_leaves_no_trace(shape: str, value: float):
    data = batches(12)
    accumulate = SHAPES[shape].get("accumulate", 1)
    bad = {4, 5, 9} if accumulate == 1 else {4, 9}
    gone = {b for b in range(12) if b // accumulate in {x // accumulate for x in bad}}
    ended = made(shape).guard().fit(poisoned(data, bad, value)).everything()
    assert differences(ended, made(shape).fit(without(data, gone)).everything()) == []


@pytest.mark.parametrize("shape", ["plain", "closure", "accumulated"])
def test_a_bad_gradient_leaves_no_trace(shape: str):
    data = batches(8)
    framework = made(shape).guard()
    assert framework.driven is not None
    with inject(framework.driven.guard, "nan", into="gradient", parameter="last.bias", step=2):
        ended = framework.fit(data).everything()
    accumulate = SHAPES[shape].get("accumulate", 1)
    gone = range(2 * accumulate, 3 * accumulate)
    assert differences(ended, made(shape).fit(without(data, gone)).everything()) == []
    (event,) = framework.driven.guard.summary().events
    assert (event.finding.name, event.finding.step) == ("non-finite-gradient", 2)


def test_a_spike_leaves_no_trace():
    data = batches(24)
    framework = made("plain").guard()
    assert framework.driven is not None
    with inject(framework.driven.guard, "spike", into="gradient", step=20, factor=1e5):
        ended = framework.fit(data).everything()
    assert differences(ended, made("plain").fit(without(data, {20})).everything()) == []


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("unscale", [False, True])
def test_an_overflow_is_left_to_the_scaler(unscale: bool):
    """A finite loss with a scaled gradient that is not is how loss scaling works."""
    ended = []
    for guarded in (True, False):
        huge = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=100)
        framework = Framework(scaler=huge, unscale=unscale)
        if guarded:
            summary = framework.guard().driven.guard.summary()
        framework.model.last.weight.register_hook(lambda gradient: gradient * 20)
        ended.append(framework.fit(batches(8)).everything())
    assert differences(*ended) == []
    assert (summary.skipped, summary.steps) == (0, 8)
    assert 0 < summary.overflows < 8


def test_the_ladder_cuts_the_rate_and_the_schedule_does_not_see_it():
    settings = Settings(max_skips=0, lr_climb_after=2, snapshot_every=0, spikes="off")
    framework = made("plain").guard(settings)
    rates = []
    framework.optimizer.register_step_pre_hook(
        lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"])
    )
    framework.fit(poisoned(batches(6), {1}))
    assert rates == pytest.approx([0.01, 0.005, 0.0045, 0.009, 0.0081])
    assert framework.driven is not None
    assert framework.driven.guard.summary().lr_cuts == 1


def test_the_ladder_rolls_back():
    settings = Settings(on_bad="rollback", snapshot_every=2, spikes="off")
    data = batches(6)
    framework = made("plain").guard(settings)
    ended = framework.fit(poisoned(data, {5})).everything()
    # The last snapshot was taken after four updates, when their schedule had been stepped.
    clean = made("plain").fit(data[:4]).everything()
    del ended["torch"], clean["torch"]
    assert differences(ended, clean) == []


def test_the_ladder_stops_and_leaves_nothing_behind():
    framework = made("closure").guard(Settings(on_bad="stop"))
    with pytest.raises(NonFiniteError, match="the loss is nan"):
        framework.fit(poisoned(batches(4), {2}))
    step = vars(framework.optimizer)["step"]
    assert step._wrapped_by_lr_sched
    assert step.__code__.co_filename.endswith("lr_scheduler.py")


def test_a_first_step_that_is_bad_is_no_reason_for_a_scheduler_to_warn():
    framework = made("plain").guard()
    framework.fit(poisoned(batches(4), {0}))
    assert framework.scheduler.last_epoch == 3


def test_a_step_without_a_backward_pass_is_the_frameworks_own_business():
    framework = made("plain").guard()
    framework.driven.begin_batch(None)
    framework.optimizer.step()
    framework.driven.end_batch()
    framework.driven.close()
    assert framework.driven.guard.steps == 0


def test_two_optimizers_are_judged_one_by_one():
    seed_all(0)
    models = [Net(), Net()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    driven = Driven(models, optimizers, settings=QUIET)
    before = [p.clone() for p in models[0].parameters()]
    for x, _ in poisoned(batches(1), {0}):
        driven.begin_batch(x)
        for model, optimizer, given in zip(models, optimizers, (x, torch.ones(4, 8)), strict=True):
            loss = model(given).square().mean()
            driven.saw_loss(loss)
            loss.backward()
            optimizer.step()
        driven.end_batch()
    driven.close()
    assert [event.finding.step for event in driven.guard.summary().events] == [0]
    assert driven.guard.summary().applied == 1
    assert differences(before, [p.detach() for p in models[0].parameters()]) == []
