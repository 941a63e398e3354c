"""What a run writes down: its log, checkpoints, and W&B where that is wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from settings import Settings, stop

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

KEEP = 3


class Records:
    """Everything that is written into the folder of the run."""

    def __init__(self, settings: Settings, out: Path) -> None:
        self.out = out
        out.mkdir(parents=True, exist_ok=True)
        settings.write(out)
        self.log = (out / "train.log").open("a", encoding="utf-8", buffering=1)
        self.wandb = _wandb(out) if settings["training.wandb"] else None

    def step(self, step: int, steps: int, loss: float, rate: float) -> None:
        """Writes the line of a step."""
        self._line(f"Step {step}/{steps} | Train Loss: {loss:.4f} | LR: {rate:.2e}")
        if self.wandb is not None:
            self.wandb.log({"train/loss": loss, "lr": rate}, step=step)

    def alarm(self, step: int, loss: float) -> None:
        """Says that a loss is above the alarm; NaN is above every alarm."""
        self._line(f"🚨 loss alarm at step {step}: {loss}")

    def evaluation(self, step: int, found: dict[str, tuple[float, float]]) -> None:
        """Writes a line for each data set."""
        self._line(f"📊 evaluation at step {step}")
        for name, (loss, accuracy) in found.items():
            self._line(f"📂 {name}: Loss: {loss:.4f}, Accuracy: {accuracy:.4f} ({accuracy:.2%})")
            if self.wandb is not None:
                named = {f"eval/{name}_loss": loss, f"eval/{name}_accuracy": accuracy}
                self.wandb.log(named, step=step)

    def save(self, step: int, model: nn.Module, optimizer: Any) -> None:
        """Writes a checkpoint, and keeps the last ones."""
        folder = self.out / "checkpoints"
        folder.mkdir(exist_ok=True)
        path = folder / f"step_{step:06d}.pt"
        part = path.with_suffix(".part")
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, part)
        part.replace(path)
        for old in sorted(folder.glob("step_*.pt"))[:-KEEP]:
            old.unlink()

    def close(self) -> None:
        """Closes the files."""
        self.log.close()
        if self.wandb is not None:
            self.wandb.finish()

    def _line(self, text: str) -> None:
        print(text, flush=True)
        self.log.write(text + "\n")


def load_checkpoint(path: Path, model: nn.Module, optimizer: Any) -> int:
    """Loads a checkpoint; returns how many steps it has seen."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])
    except FileNotFoundError:
        stop(f"{path} is not there; name a checkpoint with --resume")
    except (RuntimeError, KeyError, ValueError, TypeError, EOFError) as error:
        stop(f"{path} is no checkpoint of this model: {' '.join(str(error).split())[:150]}")
    except Exception as error:
        stop(f"{path} cannot be loaded safely: {' '.join(str(error).split())[:100]}")


def _wandb(out: Path) -> Any:
    try:
        import wandb
    except ImportError:
        stop("training.wandb is true, but wandb is not installed; pip install wandb")
    return wandb.init(project="multi-dataset-classifier", mode="offline", dir=out)
