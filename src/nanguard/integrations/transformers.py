"""Hugging Face ``Trainer``: a callback.

For example:

guarding = NanguardCallback(run_dir="runs/night", incidents=True)
trainer = Trainer(model=model, args=args, callbacks=[guarding])
"""

from __future__ import annotations

import functools
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard.errors import MissingDependencyError, UsageError

try:
    import torch
    from torch.optim.lr_scheduler import ReduceLROnPlateau
    from transformers import Trainer, TrainerCallback

    from nanguard.guard.driven import Driven
    from nanguard.snapshots.disk import load_tree, save_tree
except ModuleNotFoundError as error:
    what = "nanguard.integrations.transformers"
    raise MissingDependencyError.of(what, error, extra="transformers") from error

if TYPE_CHECKING:
    from types import FrameType

    from nanguard.guard.guard import Guard
    from nanguard.settings import Settings


class NanguardCallback(TrainerCallback):
    """Guards the steps of a ``Trainer``.

    Attributes:
        guard: The guard; None before the training has started.

    Args:
        settings: As for a guard. The host is never late.
        options: What else a guard is given: ``ema``, ``run_dir``, ``incidents``, ``on_event``...
    """

    def __init__(self, *, settings: Settings | None = None, **options: Any) -> None:
        self._options = {**options, "settings": settings}
        self._driven: Driven | None = None
        self._undo: list[tuple[Any, str]] = []

    @property
    def guard(self) -> Guard | None:
        """The guard; None before the training has started."""
        return None if self._driven is None else self._driven.guard

    def on_train_begin(self, args: Any, state: Any, control: Any, **_given: Any) -> None:
        """Makes the guard, and listens where no callback is called."""
        self.close()
        trainer, resumed = _calling_trainer()
        _check(trainer, NanguardCallback)
        wrapper, scheduler = trainer.optimizer, trainer.lr_scheduler
        self._driven = Driven(
            trainer.model_wrapped,
            getattr(wrapper, "optimizer", wrapper),
            steps=[wrapper],
            scheduler=[] if isinstance(scheduler, ReduceLROnPlateau) else [scheduler],
            scaler=trainer.accelerator.scaler,
            **self._options,
        )
        self._logged = LoggedLoss(self._driven, state.global_step)
        if resumed is not None:
            _load(self._driven, resumed)
        self._listen(trainer, self._driven)

    def on_step_end(self, args: Any, state: Any, control: Any, **_given: Any) -> None:
        """Ends a step."""
        self._running.end_batch()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_given: Any) -> None:
        """Ends an epoch."""
        self._running.end_epoch()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_given: Any) -> None:
        """Takes skipped steps out of the mean loss that is logged."""
        if self._driven is not None and logs is not None:
            self._logged.correct(logs, state.global_step)
            # The Trainer has taken its own copy already.
            state.log_history[-1].update(logs)

    def on_save(self, args: Any, state: Any, control: Any, **_given: Any) -> None:
        """Adds the guard's state to the checkpoint."""
        _save(self._running, Path(args.output_dir, f"checkpoint-{state.global_step}"))

    def on_train_end(self, args: Any, state: Any, control: Any, **_given: Any) -> None:
        """Leaves nothing behind."""
        self.close()

    def close(self) -> None:
        """Leaves nothing behind; call it if the training ended with an error of its own."""
        for owner, name in reversed(self._undo):
            vars(owner).pop(name, None)
        self._undo.clear()
        if self._driven is not None:
            self._driven.close()

    @property
    def _running(self) -> Driven:
        assert self._driven is not None  # noqa: S101 - on_train_begin comes first
        return self._driven

    def _listen(self, trainer: Any, driven: Driven) -> None:
        """Learns of batches and losses, which no callback receives."""
        accelerator = trainer.accelerator
        train, back = trainer.training_step, accelerator.backward

        @functools.wraps(train)
        def training_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                driven.begin_batch(inputs)
                loss = train(model, inputs, *args, **kwargs)
                if accelerator.sync_gradients:
                    driven.judge()
            except BaseException:  # Ctrl-C, too, and it goes on
                self.close()
                raise
            # The Trainer only adds it to the mean it logs, from which the skipped steps are taken
            # out again; one NaN there would stay in every mean to come.
            return torch.where(torch.isfinite(loss), loss, torch.zeros_like(loss))

        @functools.wraps(back)
        def backward(loss: Any, **kwargs: Any) -> Any:
            driven.saw_loss(loss)
            return back(loss, **kwargs)

        trainer.training_step, accelerator.backward = training_step, backward
        self._undo = [(trainer, "training_step"), (accelerator, "backward")]
        # Before those that write the log somewhere.
        callbacks = trainer.callback_handler.callbacks
        callbacks.insert(0, callbacks.pop(callbacks.index(self)))


_WHERE = "NanguardCallback"


def _calling_trainer() -> tuple[Any, Path | None]:
    """Returns the trainer that calls a callback, and the checkpoint that it resumes from.

    A callback receives neither, so they are looked for where the call came from.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        trainer = frame.f_locals.get("self")
        if isinstance(trainer, Trainer):
            resumed = frame.f_locals.get("resume_from_checkpoint")
            return trainer, Path(resumed) if isinstance(resumed, str) else None
        frame = frame.f_back
    raise UsageError(
        "the callback was not called by a transformers.Trainer.",
        where=_WHERE,
        do="Give it to a Trainer: Trainer(..., callbacks=[NanguardCallback()]).",
    )


def _check(trainer: Any, kind: type) -> None:
    """Refuses what cannot be guarded, before the training starts."""
    if sum(isinstance(callback, kind) for callback in trainer.callback_handler.callbacks) > 1:
        raise UsageError(
            "there is more than one NanguardCallback.",
            where="Trainer(callbacks=...)",
            do="Give one, or take the other away with trainer.remove_callback(...).",
        )
    if trainer.is_deepspeed_enabled:
        raise UsageError(
            "with DeepSpeed the step is made inside of its engine.",
            where=_WHERE,
            do="Use DDP or FSDP, or train under `nanguard run`, which watches without acting.",
        )


def _save(driven: Driven, folder: Path) -> None:
    """Adds the guard's state to a checkpoint of the trainer."""
    if folder.is_dir():
        save_tree(driven.guard.state_dict(), _file(folder, driven))


def _load(driven: Driven, folder: Path) -> None:
    """Continues from the guard's state in a checkpoint, if there is one."""
    path = _file(folder, driven)
    if path.is_file():
        driven.load_state_dict(load_tree(path))


def _file(folder: Path, driven: Driven) -> Path:
    return folder / f"nanguard-rank{driven.rank}.pt"


SKIPPED = "nanguard_skipped"


class LoggedLoss:
    """Corrects means into which a loss that is not finite went as 0.

    A mean over n steps, k of which had no finite loss, is the sum of the others divided by n. It
    is to be divided by n - k, and it is to be said how many steps were skipped.

    Args:
        driven: Knows the steps that were bad.
        step: The framework's count of steps so far.
    """

    def __init__(self, driven: Driven, step: int) -> None:
        self._driven = driven
        self._first = self._last = step
        self._lost = self._skipped = 0.0

    def correct(self, logs: dict[str, Any], step: int) -> None:
        """Corrects what is about to be logged, in place.

        Args:
            logs: The numbers; those called ``loss`` (since the last time) and ``train_loss``
                (since the beginning) are corrected.
            step: The framework's count of steps.
        """
        lost, skipped = self._driven.lost, float(self._driven.guard.summary().skipped)
        if "train_loss" in logs:
            logs["train_loss"] = _mean(logs["train_loss"], step - self._first, lost)
            logs[SKIPPED] = int(skipped)
        if "loss" in logs and step > self._last:
            logs["loss"] = _mean(logs["loss"], step - self._last, lost - self._lost)
            if skipped > self._skipped:
                logs[SKIPPED] = int(skipped - self._skipped)
            self._last, self._lost, self._skipped = step, lost, skipped


def _mean(mean: float, steps: int, lost: float) -> float:
    counted = steps - lost
    # No step had a loss, which is not the same as a loss of 0.
    return mean * steps / counted if counted > 0 else math.nan
