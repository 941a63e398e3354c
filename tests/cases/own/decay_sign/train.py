"""An 'L2 penalty' with the wrong sign: the weights grow without bound."""
import torch
from torch import nn
from penalty import l2

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(600, 12)
y = torch.randint(0, 4, (600,))
for step in range(600):
    rows = torch.randint(0, 600, (30,))
    logits = model(x[rows])
    loss = nn.functional.cross_entropy(logits, y[rows]) + l2(model, 0.5)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}")
