"""Lightning 2.x: a callback.

For example:

trainer = Trainer(callbacks=[NanguardCallback(run_dir="runs/night", incidents=True)])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanguard.errors import MissingDependencyError, UsageError

try:
    try:
        from lightning.pytorch import Callback
    except ModuleNotFoundError:
        # The same framework under its older name.
        from pytorch_lightning import Callback  # type: ignore[assignment]
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    from nanguard.guard.driven import Driven
except ModuleNotFoundError as error:
    what = "nanguard.integrations.lightning"
    raise MissingDependencyError.of(what, error, extra="lightning") from error

if TYPE_CHECKING:
    from nanguard.guard.guard import Guard
    from nanguard.settings import Settings

_WHERE = "NanguardCallback"


class NanguardCallback(Callback):
    """Guards the steps of a Lightning trainer, with automatic or manual optimization.

    Attributes:
        guard: The guard; None before the fit has started.

    Args:
        settings: As for a guard. The host is never late.
        options: What else a guard is given: ``ema``, ``run_dir``, ``incidents``, ``on_event``...
    """

    def __init__(self, *, settings: Settings | None = None, **options: Any) -> None:
        self._options = {**options, "settings": settings}
        self._driven: Driven | None = None
        self._saved: dict[str, Any] | None = None

    @property
    def guard(self) -> Guard | None:
        """The guard; None before the fit has started."""
        return None if self._driven is None else self._driven.guard

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Makes the guard, now that there are optimizers."""
        _check(trainer)
        configs = trainer.lr_scheduler_configs
        self._driven = Driven(
            trainer.strategy.model,
            list(trainer.optimizers),
            scheduler=[
                config.scheduler
                for config in configs
                if config.interval == "step" and not isinstance(config.scheduler, ReduceLROnPlateau)
            ],
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            **self._options,
        )
        if self._saved is not None:
            self._driven.load_state_dict(self._saved)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, _index: int) -> None:
        """Hands a batch on."""
        self._running.begin_batch(batch)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Hands a loss on."""
        self._running.saw_loss(loss, scaled=True)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Has a step judged, before its gradients are clipped."""
        self._running.judge(getattr(optimizer, "optimizer", optimizer))

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, _index: int
    ) -> None:
        """Ends a batch."""
        self._running.end_batch()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Ends an epoch."""
        self._running.end_epoch()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leaves nothing behind."""
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leaves nothing behind."""
        if self._driven is not None and stage == "fit":
            self._driven.close()

    def state_dict(self) -> dict[str, Any]:
        """Returns the guard's state, for the trainer's checkpoint."""
        return {} if self._driven is None else {"guard": self._driven.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a checkpoint; before the fit, its state is kept until there is a guard."""
        self._saved = state_dict.get("guard")
        if self._driven is not None and self._saved is not None:
            self._driven.load_state_dict(self._saved)

    @property
    def _running(self) -> Driven:
        assert self._driven is not None  # noqa: S101 - on_fit_start comes first
        return self._driven


def _check(trainer: Any) -> None:
    if sum(isinstance(callback, NanguardCallback) for callback in trainer.callbacks) > 1:
        raise UsageError(
            "there is more than one NanguardCallback.",
            where="Trainer(callbacks=...)",
            do="Give one; several optimizers of a trainer are guarded by the same one.",
        )
    if trainer.strategy.handles_gradient_accumulation:
        raise UsageError(
            f"{type(trainer.strategy).__name__} makes the step inside of an engine.",
            where=_WHERE,
            do="Use DDP or FSDP, or train under `nanguard run`, which watches without acting.",
        )
    if not any(group["params"] for o in trainer.optimizers for group in o.param_groups):
        raise UsageError(
            "the trainer has no optimizer, so there is no step to guard.",
            where=_WHERE,
            do="Return one from configure_optimizers().",
        )
