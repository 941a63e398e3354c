"""Ends itself at a bad loss: by an exception, or by leaving."""

import os
import sys

from common import BAD, F, Net, batches, show, torch

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
first = BAD if sys.argv[2:] else 0


def leave(loss):
    if sys.argv[1] == "raise":
        raise FloatingPointError(f"loss is {loss.item()}")
    if sys.argv[1] == "class":
        raise SystemExit
    if sys.argv[1] == "instance":
        raise SystemExit(5)
    if sys.argv[1] == "quit":
        quit(5)
    if sys.argv[1] == "at once":
        sys.stdout.flush()
        os._exit(5)
    sys.exit(5)


def train():
    for step, (x, y) in list(enumerate(batches()))[first:]:
        loss = F.mse_loss(net(x), y)
        if not torch.isfinite(loss):
            if sys.argv[1] == "break":
                break
            leave(loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        show(step, loss)


try:
    train()
finally:
    print("left")
