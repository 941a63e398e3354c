import json
import random
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file


class RunState:
    """Weights as safetensors, optimizer through the restricted unpickler, counters as JSON."""

    def __init__(self, folder: str, keep: int = 3):
        self.dir, self.keep = Path(folder), keep
        self.dir.mkdir(parents=True, exist_ok=True)

    def save(self, step: int, model, opt, best: float):
        d = self.dir / f"step_{step:08d}"
        d.mkdir(exist_ok=True)
        save_file(model.state_dict(), d / "model.safetensors")
        torch.save(opt.state_dict(), d / "opt.pt")
        (d / "meta.json").write_text(json.dumps({"step": step, "best": best}))
        for old in sorted(self.dir.glob("step_*"))[:-self.keep]:
            for f in old.iterdir():
                f.unlink()
            old.rmdir()

    def load(self, model, opt, device="cpu"):
        found = sorted(self.dir.glob("step_*"))
        if not found:
            return {"step": 0, "best": float("inf")}
        d = found[-1]
        model.load_state_dict(load_file(d / "model.safetensors", device=str(device)))
        opt.load_state_dict(torch.load(d / "opt.pt", map_location=device, weights_only=True))
        return json.loads((d / "meta.json").read_text())


def load_partial(model, path):
    kwargs = {"map_location": "cpu", "weights_only": True}
    src = torch.load(path, **kwargs)
    own = model.state_dict()
    ok = {k: v for k, v in src.items() if k in own and own[k].shape == v.shape}
    model.load_state_dict(ok, strict=False)
    return sorted(set(own) - set(ok))


def seed_all(seed: int):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def load_embeddings(path: str) -> torch.Tensor:
    return torch.from_numpy(np.load(path, allow_pickle=False)).float()
