import torch
from torch import nn


def prepare(path):
    """What the earlier run left behind: one row of the gate had gone bad unseen."""
    generator = torch.Generator().manual_seed(5)
    state = {
        "encoder.0.weight": torch.randn(32, 8, generator=generator) * 0.2,
        "encoder.0.bias": torch.zeros(32),
        "encoder.2.weight": torch.randn(16, 32, generator=generator) * 0.2,
        "encoder.2.bias": torch.zeros(16),
        "gate.weight": torch.randn(50, 16, generator=generator) * 0.2,
        "head.weight": torch.randn(1, 16, generator=generator) * 0.2,
        "head.bias": torch.zeros(1),
    }
    state["gate.weight"][47] = float("nan")
    torch.save({"model": state, "step": 1200}, path)


def load_weights(model, path):
    state = torch.load(path)
    model.load_state_dict(state["model"])
