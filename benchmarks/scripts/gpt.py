"""Trains a language model in the shape of GPT-2, as anyone would. It knows nothing of nanguard.

The last line it prints is JSON: the mean milliseconds per step of each block of steps.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.guard_overhead import Decoder


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """Random text."""

    def __init__(self, count: int, length: int, vocab: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.text = torch.randint(0, vocab, (count, length + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.text[index, :-1], self.text[index, 1:]


def main() -> None:
    """Trains, and measures itself."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--block", type=int, default=20)
    parser.add_argument("--launch-bound", action="store_true", help="few tokens, on CUDA")
    args = parser.parse_args()
    torch.manual_seed(0)
    cuda = args.device == "cuda"
    vocab, length, batch = (50304, 1024, 16) if cuda else (2048, 64, 8)
    if args.launch_bound:
        length, batch = 256, 2
    shape = (768, 12, 12) if cuda else (128, 4, 4)
    model = Decoder(vocab, length, *shape).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    steps = args.block * (args.blocks + 1)
    loader = DataLoader(Tokens(steps * batch, length, vocab), batch_size=batch, pin_memory=cuda)
    times, began = [], time.perf_counter()
    for step, (x, y) in enumerate(loader):
        x, y = x.to(args.device, non_blocking=True), y.to(args.device, non_blocking=True)
        with torch.autocast(args.device, dtype=torch.bfloat16, enabled=cuda):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % args.block == 0:
            if cuda:
                torch.cuda.synchronize()
            now = time.perf_counter()
            times.append(1000 * (now - began) / args.block)
            began = now
    print(json.dumps({"ms": times[1:], "loss": loss.item()}))


if __name__ == "__main__":
    main()
