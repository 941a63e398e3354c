"""What a run writes down: its log, and numbers that move before a loss does."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pathlib import Path

    from diffusion import Losses
    from system import Training

WATCHED = ("t_min", "weight_max", "latent_max", "prediction_max")


class Records:
    """``train.log`` and ``monitor.csv`` in the folder of a run."""

    def __init__(self, out: Path) -> None:
        self._log = (out / "train.log").open("a", encoding="utf-8")
        self._file = (out / "monitor.csv").open("a", newline="", encoding="utf-8")
        self._monitor = csv.writer(self._file)
        if self._file.tell() == 0:
            self._monitor.writerow(("step", "grad_norm", "lr", *WATCHED))

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *_: object) -> None:
        self._log.close()
        self._file.close()

    def line(self, text: str) -> None:
        """Writes a line to the log and to the screen."""
        print(text, flush=True)
        self._log.write(text + "\n")
        self._log.flush()

    def begin(self, run: Training) -> None:
        """Says in which precision the run computes."""
        trainer = run.settings.trainer
        self.line(
            f"amp: {trainer.amp} | fp16: {trainer.fp16} | "
            f"mixed_precision: {run.settings.mixed_precision}"
        )

    def step(self, run: Training, made: Step) -> None:
        """Writes what one step came to."""
        simple, vlb, total = torch.stack(made.shown).mean(0).tolist()
        rate = run.optimizer.param_groups[0]["lr"]
        self.line(
            f"[Train Step] {run.step}/{run.settings.trainer.train_num_steps}: "
            f"loss_simple: {simple:.5f}, loss_vlb: {vlb:.5f}, total_loss: {total:.5f}, "
            f"lr: {rate:.6f}"
        )
        norm = "" if made.norm is None else f"{float(made.norm):.6g}"
        watched = [f"{value:.6g}" for value in made.watched()]
        self._monitor.writerow([run.step, norm, f"{rate:.6g}", *watched])

    def sample(self, run: Training) -> None:
        """Draws maps and writes how far off they are."""
        steps = run.settings.trainer.train_num_steps
        self.line(f"[Sample] {run.step}/{steps}: rmse_db: {run.error_db():.2f}")


class Step:
    """The batches that one step is made of."""

    def __init__(self) -> None:
        self.shown: list[torch.Tensor] = []
        self.norm: torch.Tensor | None = None  # the guard keeps it in its own record
        self._watched: list[dict[str, torch.Tensor]] = []

    def add(self, found: Losses, total: torch.Tensor) -> None:
        """Adds a batch.

        Args:
            found: Its losses.
            total: What was trained on.
        """
        self.shown.append(torch.stack([found.simple, found.vlb, total]).detach().float())
        self._watched.append(found.watched)

    def watched(self) -> list[float]:
        """Returns the extremes of what is watched."""
        found = {name: [float(one[name]) for one in self._watched] for name in WATCHED}
        return [min(found[n]) if n == "t_min" else max(found[n]) for n in WATCHED]
