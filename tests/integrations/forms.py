"""The same training in four forms: a plain loop, Accelerate, Lightning, and Trainer."""

from __future__ import annotations

import contextlib
import logging
import random
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from torch.utils.data import DataLoader, SequentialSampler, default_collate
from transformers import Trainer, TrainingArguments

from nanguard import Guard, Settings
from nanguard.integrations.accelerate import guard_for
from nanguard.integrations.lightning import NanguardCallback as LightningCallback
from nanguard.integrations.transformers import NanguardCallback as TrainerCallback
from tests.integrations.tiny import SIZE, Tiny

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

logging.getLogger("lightning").setLevel(logging.ERROR)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

SETTINGS = Settings(spike_warmup=16, spike_window=16, max_skips=20, snapshot_every=0)


@dataclass
class Asked:
    """What a training is to be like.

    Attributes:
        folder: Where a framework may write.
        data: The samples, in order.
        accumulate: Batches for one step.
        bf16: Whether to compute in bfloat16 where that is possible.
        epochs: Passes over the data.
        options: For the guard.
    """

    folder: Path
    data: list[Any]
    accumulate: int = 1
    bf16: bool = False
    epochs: int = 1
    stop_after: int | None = None
    resume: Any = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Ended:
    """What came of a training."""

    model: Tiny
    optimizer: torch.optim.Optimizer
    scheduler: Any
    guard: Guard
    saved: Any = None
    framework: Any = None

    def everything(self) -> dict[str, Any]:
        """Returns all that two trainings are compared by."""
        return {
            "model": {k: v.clone() for k, v in self.model.state_dict().items()},
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state()[1],
        }


def build() -> tuple[Tiny, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Tiny()
    return (model, *optimizer_of(model))


def optimizer_of(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.05 * step))
    return optimizer, scheduler


def loader_of(data: list[Any]) -> DataLoader[Any]:
    return DataLoader(data, SIZE, sampler=SequentialSampler(data), collate_fn=default_collate)


def plain(asked: Asked) -> Ended:
    model, optimizer, scheduler = build()
    options = {"settings": SETTINGS, **asked.options}
    saved = None
    with Guard(model, optimizer, scheduler=scheduler, **options) as guard:
        if asked.resume is not None:
            model.load_state_dict(asked.resume["model"])
            optimizer.load_state_dict(asked.resume["optimizer"])
            scheduler.load_state_dict(asked.resume["scheduler"])
            guard.load_state_dict(asked.resume["guard"])
        for _ in range(guard.epoch, asked.epochs):
            for index, batch in guard.enumerate(loader_of(asked.data)):
                with torch.autocast("cpu", torch.bfloat16, enabled=asked.bf16):
                    loss = model(**batch)["loss"]
                guard.backward(loss / asked.accumulate)
                if (index + 1) % asked.accumulate == 0:
                    guard.step(max_norm=1.0)
                if guard.steps == asked.stop_after:
                    saved = {
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "scheduler": scheduler.state_dict(),
                        "guard": guard.state_dict(),
                    }
                    return Ended(model, optimizer, scheduler, guard, saved)
    return Ended(model, optimizer, scheduler, guard, saved)


def accelerated(asked: Asked) -> Ended:
    model, optimizer, scheduler = build()
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=asked.accumulate,
        mixed_precision="bf16" if asked.bf16 else "no",
    )
    wrapped, prepared, loader, schedule = accelerator.prepare(
        model, optimizer, loader_of(asked.data), scheduler
    )
    options = {"settings": SETTINGS, **asked.options}
    guard = guard_for(accelerator, wrapped, prepared, scheduler=schedule, **options)
    saved = None
    with guard:
        if asked.resume is not None:
            accelerator.load_state(asked.resume)
        for _ in range(guard.epoch, asked.epochs):
            for batch in guard.watch(loader):
                with accelerator.accumulate(wrapped):
                    guard.backward(wrapped(**batch)["loss"])
                    guard.step(max_norm=1.0)
                if guard.steps == asked.stop_after:
                    saved = str(asked.folder / "state")
                    accelerator.save_state(saved)
                    return Ended(model, optimizer, scheduler, guard, saved)
    return Ended(model, optimizer, scheduler, guard, saved)


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.tiny = Tiny()

    def training_step(self, batch: Any, _index: int) -> Any:
        return self.tiny(**batch)["loss"]

    def configure_optimizers(self) -> Any:
        optimizer, scheduler = optimizer_of(self)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def lightning(asked: Asked) -> Ended:
    build()
    torch.manual_seed(0)
    module = Module()
    callback = LightningCallback(**{"settings": SETTINGS, **asked.options})
    trainer = LightningTrainer(
        accelerator="cpu",
        devices=2 if torch.distributed.is_initialized() else 1,
        strategy="ddp" if torch.distributed.is_initialized() else "auto",
        max_epochs=asked.stop_after or asked.epochs,
        accumulate_grad_batches=asked.accumulate,
        gradient_clip_val=1.0,
        precision="bf16-mixed" if asked.bf16 else "32-true",
        callbacks=[callback],
        use_distributed_sampler=False,
        **QUIET_LIGHTNING,
    )
    with quiet():
        trainer.fit(module, loader_of(asked.data), ckpt_path=asked.resume)
    saved = None
    if asked.stop_after is not None:
        saved = str(asked.folder / "lightning.ckpt")
        trainer.save_checkpoint(saved)
    return Ended(
        module.tiny,
        trainer.optimizers[0],
        trainer.lr_scheduler_configs[0].scheduler,
        callback.guard,
        saved,
        trainer,
    )


QUIET_LIGHTNING: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class InOrder(Trainer):
    """A Trainer that does not shuffle."""

    def _get_train_sampler(self, *_args: Any) -> Any:
        return SequentialSampler(self.train_dataset)


def trained(asked: Asked, **arguments: Any) -> Ended:
    model, optimizer, scheduler = build()
    callback = TrainerCallback(**{"settings": SETTINGS, **asked.options})
    arguments = {
        "logging_strategy": "steps",
        "logging_steps": 4,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        **arguments,
    }
    if asked.stop_after is not None:
        arguments |= {"save_strategy": "steps", "save_steps": asked.stop_after}
        arguments["max_steps"] = asked.stop_after
    trainer = InOrder(
        model=model,
        args=TrainingArguments(
            output_dir=str(asked.folder / "trainer"),
            num_train_epochs=asked.epochs,
            per_device_train_batch_size=SIZE,
            gradient_accumulation_steps=asked.accumulate,
            max_grad_norm=1.0,
            bf16=asked.bf16,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
            seed=0,
            **arguments,
        ),
        train_dataset=asked.data,
        data_collator=default_collate,
        optimizers=(optimizer, scheduler),
        callbacks=[callback],
    )
    with quiet(), contextlib.redirect_stdout(None):
        trainer.train(resume_from_checkpoint=asked.resume)
    saved = str(asked.folder / "trainer" / f"checkpoint-{asked.stop_after}")
    return Ended(model, optimizer, scheduler, callback.guard, saved, trainer)


FORMS: dict[str, Callable[[Asked], Ended]] = {
    "plain": plain,
    "accelerate": accelerated,
    "lightning": lightning,
    "trainer": trained,
}


def run(form: str, asked: Asked) -> Ended:
    """Trains in one form, in a process in which others may have been before."""
    reset()
    return FORMS[form](asked)


def reset() -> None:
    """Makes Accelerate forget how it was used before."""
    AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
    GradientState._reset_state()


@contextlib.contextmanager
def quiet() -> Any:
    """Leaves out what the frameworks warn of on a machine without an accelerator."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"lightning.*|torch\.utils\.data.*")
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield
