"""What cannot work is refused before the training starts, with what to do about it."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerate import Accelerator
from lightning.pytorch import Trainer as LightningTrainer

from nanguard.errors import UsageError
from nanguard.guard.driven import Driven
from nanguard.integrations.accelerate import guard_for
from nanguard.integrations.lightning import NanguardCallback as LightningCallback
from nanguard.integrations.transformers import NanguardCallback as TrainerCallback
from tests.integrations import forms
from tests.integrations.forms import Asked
from tests.integrations.tiny import Tiny, samples

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def fresh() -> None:
    forms.reset()


def test_accelerate_is_given_something_else():
    model, optimizer, _ = forms.build()
    with pytest.raises(UsageError, match="of type Tiny, not an Accelerator"):
        guard_for(model, model, optimizer)


def test_accelerate_has_not_prepared_the_optimizer():
    model, optimizer, _ = forms.build()
    with pytest.raises(UsageError, match=r"AdamW\) was not prepared") as caught:
        guard_for(Accelerator(cpu=True), model, optimizer)
    assert "accelerator.prepare" in caught.value.do


def two_models(accelerator: Accelerator, make_schedule: Any) -> tuple[list[Any], ...]:
    models = [Tiny(), Tiny()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    schedules = [make_schedule(optimizer) for optimizer in optimizers]
    prepared = accelerator.prepare(*models, *optimizers, *schedules)
    return list(prepared[:2]), list(prepared[2:4]), list(prepared[4:])


def test_schedules_of_several_optimizers_follow_their_own():
    accelerator = Accelerator(cpu=True)
    models, optimizers, schedules = two_models(
        accelerator, lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    )
    (batch,) = forms.loader_of(samples(1))
    with guard_for(accelerator, models, optimizers, scheduler=schedules) as guard:
        for _ in range(2):
            guard.backward(models[0](**batch)["loss"])
            guard.step(optimizers[0])
    assert [schedule.get_last_lr() for schedule in schedules] == [[0.25], [1.0]]


def test_accelerate_has_wrapped_a_schedule_that_follows_a_metric():
    accelerator = Accelerator(cpu=True)
    models, optimizers, schedules = two_models(
        accelerator, torch.optim.lr_scheduler.ReduceLROnPlateau
    )
    with pytest.raises(UsageError, match="ReduceLROnPlateau follows a metric"):
        guard_for(accelerator, models, optimizers, scheduler=schedules)


class WithoutOptimizer(forms.Module):
    def configure_optimizers(self) -> None:
        return None


class WithSearch(forms.Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def fit(module: forms.Module, *callbacks: Any) -> None:
    trainer = LightningTrainer(
        accelerator="cpu", max_epochs=1, callbacks=list(callbacks), **forms.QUIET_LIGHTNING
    )
    with forms.quiet():
        trainer.fit(module, forms.loader_of(samples(2)))


def test_lightning_without_an_optimizer():
    with pytest.raises(UsageError, match="no optimizer") as caught:
        fit(WithoutOptimizer(), LightningCallback())
    assert "configure_optimizers" in caught.value.do


def test_lightning_with_an_optimizer_that_searches():
    with pytest.raises(UsageError, match="LBFGS evaluates the loss several times"):
        fit(WithSearch(), LightningCallback())


def test_lightning_with_two_callbacks():
    with pytest.raises((UsageError, RuntimeError), match=r"more than one"):
        fit(forms.Module(), LightningCallback(), LightningCallback())


def test_trainer_with_two_callbacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainers = []

    class Twice(forms.InOrder):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            self.callback_handler.callbacks.append(TrainerCallback())
            trainers.append(self)

    monkeypatch.setattr(forms, "InOrder", Twice)
    with pytest.raises(UsageError, match="more than one NanguardCallback"):
        forms.run("trainer", Asked(tmp_path, samples(2)))
    assert trainers[0].state.global_step == 0


def test_a_callback_outside_of_a_trainer():
    with pytest.raises(UsageError, match="not called by a transformers"):
        TrainerCallback().on_train_begin(None, None, None)


@pytest.mark.parametrize("form", ["lightning", "trainer"])
def test_settings_of_the_wrong_type(form: str, tmp_path: Path):
    with pytest.raises(UsageError, match="settings is of type dict"):
        forms.run(form, Asked(tmp_path, samples(2), options={"settings": {"max_skips": 1}}))


def test_incidents_in_a_place_that_cannot_be_written_to(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="the folder for incidents cannot be made"):
        forms.run("plain", Asked(tmp_path, samples(2), options={"incidents": tmp_path / "file/x"}))


def test_an_optimizer_of_another_model():
    _, optimizer, _ = forms.build()
    with pytest.raises(UsageError, match="holds none of the parameters"):
        Driven(Tiny(), optimizer)
    assert "driven" not in vars(optimizer)["step"].__code__.co_filename


@pytest.mark.parametrize("name", ["accelerate", "lightning", "transformers"])
def test_a_framework_that_is_not_installed(name: str):
    hidden = {"lightning": ["lightning", "pytorch_lightning"]}.get(name, [name])
    code = f"import sys\nfor n in {hidden}: sys.modules[n] = None\n"
    code += f"import nanguard.integrations.{name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"[{name}]'" in done.stderr
