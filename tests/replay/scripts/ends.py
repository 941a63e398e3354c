"""Ends itself at a bad loss: by an exception, or by leaving."""

import sys

from common import BAD, F, Net, batches, show, torch

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
first = BAD if sys.argv[2:] else 0
for step, (x, y) in list(enumerate(batches()))[first:]:
    loss = F.mse_loss(net(x), y)
    if not torch.isfinite(loss):
        if sys.argv[1] == "raise":
            raise FloatingPointError(f"loss is {loss.item()}")
        if sys.argv[1] == "quit":
            quit(5)
        sys.exit(5)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    show(step, loss)
