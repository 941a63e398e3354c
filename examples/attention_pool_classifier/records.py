"""What a run writes down: its log, its history, TensorBoard, checkpoints."""

from __future__ import annotations

import csv
import math
from typing import TYPE_CHECKING, Any

import torch
from settings import Settings, stop

if TYPE_CHECKING:
    from pathlib import Path

    from accelerate import Accelerator
    from torch import nn

KEEP = 3


class Meter:
    """The mean of an epoch's losses."""

    def __init__(self, *, skip_bad: bool) -> None:
        self.skip_bad = skip_bad
        self.skipped = 0
        self._losses: list[float] = []

    def add(self, loss: float) -> None:
        """Takes the loss of a batch."""
        if math.isfinite(loss) or not self.skip_bad:
            self._losses.append(loss)

    def sums(self) -> list[float]:
        """Returns the sum of the losses and how many there are."""
        return [math.fsum(self._losses) if self._finite() else math.nan, len(self._losses)]

    def _finite(self) -> bool:
        return all(map(math.isfinite, self._losses))


class Records:
    """Everything that the main process writes into the folder of the run."""

    def __init__(self, accelerator: Accelerator, settings: Settings, out: Path) -> None:
        self.accelerator = accelerator
        self.out = out
        self.best = math.inf
        self.board: Any = None
        if not accelerator.is_main_process:
            return
        out.mkdir(parents=True, exist_ok=True)
        settings.write(out / "config.yaml")
        self.log = (out / "train.log").open("a", encoding="utf-8", buffering=1)
        self.history = (out / "training_history.csv").open("a", newline="", encoding="utf-8")
        self.table = csv.writer(self.history)
        if not self.history.tell():
            self.table.writerow(["epoch", "train_loss", "val_loss", "val_acc"])
        if settings["training.tensorboard"]:
            self.board = _board(out / "tensorboard")

    def epoch(self, epoch: int, epochs: int, meter: Meter, val_loss: float, val_acc: float) -> None:
        """Writes the line of an epoch, from the losses of all ranks."""
        sums = torch.tensor(meter.sums(), dtype=torch.float64, device="cpu")
        total, number = self.accelerator.reduce(sums.to(self.accelerator.device)).tolist()
        train_loss = total / number if number else math.nan
        if not self.accelerator.is_main_process:
            return
        self._line(
            f"Epoch {epoch}/{epochs} | Train Loss: {train_loss:.4f} | Val Loss: {val_loss:.4f} | "
            f"Val Acc: {val_acc:.4f}"
        )
        if meter.skipped:
            self._line(f"Epoch {epoch}/{epochs} | Skipped batches: {meter.skipped}")
        self.table.writerow([epoch, f"{train_loss:.6f}", f"{val_loss:.6f}", f"{val_acc:.6f}"])
        self.history.flush()
        if self.board is not None:
            named = {"loss/train": train_loss, "loss/val": val_loss, "accuracy/val": val_acc}
            for name, value in {**named, **_gpu()}.items():
                self.board.add_scalar(name, value, epoch)

    def save(self, epoch: int, loss: float, model: nn.Module, optimizer: Any, plan: Any) -> None:
        """Writes a checkpoint, and keeps the last ones and the best one."""
        if not self.accelerator.is_main_process:
            return
        folder = self.out / "checkpoints"
        folder.mkdir(exist_ok=True)
        state = {
            "epoch": epoch,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": plan.state_dict(),
        }
        _write(folder / f"epoch_{epoch:04d}.pt", state)
        # A limit that NaN fails: a checkpoint without a loss is never the best one.
        if loss < self.best:
            self.best = loss
            _write(folder / "best.pt", state)
        for old in sorted(folder.glob("epoch_*.pt"))[:-KEEP]:
            old.unlink()

    def close(self) -> None:
        """Closes the files."""
        if self.accelerator.is_main_process:
            self.log.close()
            self.history.close()
            if self.board is not None:
                self.board.close()

    def _line(self, text: str) -> None:
        print(text, flush=True)
        self.log.write(text + "\n")


def load_checkpoint(path: Path, model: nn.Module, optimizer: Any, scheduler: Any) -> int:
    """Loads a checkpoint; returns how many epochs it has seen."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        return int(state["epoch"])
    except FileNotFoundError:
        stop(f"{path} is not there; name a checkpoint with --resume")
    except (RuntimeError, KeyError, ValueError, TypeError, EOFError) as error:
        first = " ".join(str(error).split())[:150]
        stop(f"{path} is no checkpoint of this model: {first}")
    except Exception as error:
        stop(f"{path} cannot be loaded safely: {' '.join(str(error).split())[:150]}")


def _write(path: Path, state: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.replace(path)


def _board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder))


def _gpu() -> dict[str, float]:
    """Returns memory and load of the GPU, where there is one."""
    if not torch.cuda.is_available():
        return {}
    found = {"gpu/memory_gib": torch.cuda.max_memory_allocated() / 2**30}
    try:
        found["gpu/utilisation"] = float(torch.cuda.utilization())
    except (ImportError, RuntimeError):
        return found  # needs nvidia-ml-py
    return found
