"""Trains two models in turn; the second one's step 3 is bad."""

import torch

torch.manual_seed(0)
models = [torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)]
optimizers = [torch.optim.SGD(model.parameters(), lr=1e-2) for model in models]
for step in range(6):
    for which, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        x = torch.randn(8, 4)
        if (step, which) == (3, 1):
            x[0] = float("nan")
        (model(x) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
