"""Trains a tiny model, whose steps take so little that what is done around them shows.

It knows nothing of nanguard. The last line it prints is JSON: the mean CPU time of this process per
step, in microseconds, of each block of steps.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

_LAYERS, _WIDTH, _BATCH = 4, 64, 32


def main() -> None:
    """Trains, and measures itself."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--block", type=int, default=100)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers: list[nn.Module] = []
    for _ in range(_LAYERS):
        layers += [nn.Linear(_WIDTH, _WIDTH), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(_WIDTH, 1)).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=args.device == "cuda")
    count = _BATCH * args.block * (args.blocks + 1)
    data = TensorDataset(torch.randn(count, _WIDTH), torch.randn(count, 1))
    times, began = [], time.process_time()
    for step, (x, y) in enumerate(DataLoader(data, batch_size=_BATCH)):
        x, y = x.to(args.device), y.to(args.device)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % args.block == 0:
            now = time.process_time()
            times.append(1e6 * (now - began) / args.block)
            began = now
    print(json.dumps({"us": times[1:], "loss": loss.item()}))


if __name__ == "__main__":
    main()
