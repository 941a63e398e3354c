"""The same training with ``nanguard``: a bad step is never made, and the weights stay bounded.

    python guarded.py --config config.yaml --out runs/guarded

What differs from ``train.py``: the two loss weights come from ``nanguard.ops``, the learning rate
follows its schedule, and a ``Guard`` makes the steps. The failing settings need no repair.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from data import DataError
from milestones import CheckpointError
from records import Records, Step
from settings import SettingsError
from train import arguments, prepare

from nanguard import Guard, NonFiniteError
from nanguard.ops import early_time_weight, late_time_weight, warmup_cosine

if TYPE_CHECKING:
    import torch
    from system import Training

MOST = 100.0


def weights(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the two loss weights, bounded, also at t = 0 and t = 1."""
    return early_time_weight(t, MOST), late_time_weight(t, MOST)


def train(run: Training, records: Records, guard: Guard) -> None:
    """Trains to the last step."""
    trainer, made = run.settings.trainer, Step()
    every = trainer.gradient_accumulate_every
    loader = run.loader()
    while run.step < trainer.train_num_steps:
        for index, batch in guard.enumerate(loader):
            found = run.losses(batch, weights)
            guard.backward(guard.loss(simple=found.simple, vlb=found.vlb) / every)
            made.add(found, found.total)
            if (index + 1) % every:
                continue
            guard.step(max_norm=trainer.clip or 1.0)
            records.step(run, made)
            run.step, made = run.step + 1, Step()
            if run.step % trainer.save_and_sample_every == 0:
                run.save()
                records.sample(run)
            if run.step >= trainer.train_num_steps:
                return


def guard_of(run: Training) -> Guard:
    """Returns the guard of a run."""
    trainer = run.settings.trainer
    scheduler = warmup_cosine(
        run.optimizer,
        warmup_steps=trainer.warmup_steps,
        total_steps=trainer.train_num_steps,
        end_factor=trainer.min_lr / trainer.lr,
    )
    return Guard(
        run.network,
        run.optimizer,
        scheduler=scheduler,
        scaler=run.scaler if run.scaler.is_enabled() else None,
        ema=(run.ema, run.update_ema),
        run_dir=run.out / "guard",
    )


def main() -> int:
    """Trains; returns 0, 1 if the guard stopped the run, or 2 if it could not begin."""
    args = arguments()
    try:
        run = prepare(args)
    except (SettingsError, DataError, CheckpointError, OSError) as error:
        print(f"guarded.py: {error}", file=sys.stderr)
        return 2
    with Records(args.out) as records, guard_of(run) as guard:
        records.begin(run)
        try:
            train(run, records, guard)
        except NonFiniteError as error:
            records.line(f"step {run.step}: {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
