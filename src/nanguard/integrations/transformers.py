"""Hugging Face ``Trainer``: a callback.

For example::

trainer = Trainer(model=model, args=args, callbacks=[NanguardCallback(incidents="incidents")])
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard.errors import MissingDependencyError

try:
    import torch
    from torch.optim.lr_scheduler import ReduceLROnPlateau
    from transformers import TrainerCallback

    from nanguard.guard.driven import Driven
    from nanguard.guard.logged import LoggedLoss
    from nanguard.integrations import trainers
except ModuleNotFoundError as error:
    what = "nanguard.integrations.transformers"
    raise MissingDependencyError.of(what, error, extra="transformers") from error

if TYPE_CHECKING:
    from nanguard.guard.guard import Guard
    from nanguard.settings import Settings

_HIDES = (
    "logging_nan_inf_filter=True makes the Trainer log a mean in place of a loss that is not "
    "finite: set it to False. What the guard skips is left out of the logged loss and counted "
    "as nanguard_skipped"
)


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
        trainer, resumed = trainers.calling_trainer()
        trainers.check(trainer, NanguardCallback)
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
            trainers.load(self._driven, resumed)
        if args.logging_nan_inf_filter:
            self._driven.warn_of_log(_HIDES)
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
        trainers.save(self._running, Path(args.output_dir, f"checkpoint-{state.global_step}"))

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
        """Hears of batches and losses, which no callback is told of."""
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
