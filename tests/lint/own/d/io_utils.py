import json
import pickle
from pathlib import Path

import numpy as np
import torch
import yaml
from safetensors.torch import load_file, save_file


def read_vocab(path: str) -> dict[str, int]:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def read_config(path: str) -> dict:
    with open(path) as f:
        return yaml.safe_load(f)


def features(path: str) -> torch.Tensor:
    x = np.load(path, allow_pickle=False)
    bad = ~np.isfinite(x).all(-1)
    if bad.any():
        raise ValueError(f"{path}: {int(bad.sum())} rows with nan or inf")
    return torch.from_numpy(x)


def write_index(items: list, path: str):
    with open(path, "wb") as f:
        pickle.dump(items, f)


def load_weights(model, path: str, device="cpu", strict=True):
    if path.endswith(".safetensors"):
        state = load_file(path, device=device)
    else:
        state = torch.load(path, map_location=device, weights_only=True, mmap=True)
    state = {k.removeprefix("module."): v for k, v in state.items()}
    bad = [k for k, v in state.items() if v.is_floating_point() and not torch.isfinite(v).all()]
    if bad:
        raise ValueError(f"non-finite weights: {bad[:5]}")
    return model.load_state_dict(state, strict=strict)


def save(model, path: str):
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, path)
