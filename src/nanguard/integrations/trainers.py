"""What the callback of a Hugging Face ``Trainer`` has to know, and is not told."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import Trainer

from nanguard.errors import UsageError
from nanguard.snapshots.disk import load_tree, save_tree

if TYPE_CHECKING:
    from types import FrameType

    from nanguard.guard.driven import Driven

_WHERE = "NanguardCallback"


def calling_trainer() -> tuple[Any, Path | None]:
    """Returns the trainer that calls a callback, and the checkpoint that it resumes from.

    A callback is told neither, so that they are looked for where the call came from.
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


def check(trainer: Any, kind: type) -> None:
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


def save(driven: Driven, folder: Path) -> None:
    """Adds the guard's state to a checkpoint of the trainer."""
    if folder.is_dir():
        save_tree(driven.guard.state_dict(), _file(folder, driven))


def load(driven: Driven, folder: Path) -> None:
    """Continues from the guard's state in a checkpoint, if there is one."""
    path = _file(folder, driven)
    if path.is_file():
        driven.load_state_dict(load_tree(path))


def _file(folder: Path, driven: Driven) -> Path:
    return folder / f"nanguard-rank{driven.rank}.pt"
