"""MAML on sinusoids with a learned inner rate that grows: inner loop diverges in float32."""
import torch
from maml import Learner, adapt

torch.manual_seed(0)
learner = Learner()
optimizer = torch.optim.Adam(learner.parameters(), lr=1e-2)
for step in range(80):
    loss = 0.0
    for task in range(3):
        amplitude, phase = 0.1 + 4.9 * torch.rand(1), 3.14 * torch.rand(1)
        x = torch.rand(10, 1) * 10 - 5
        y = amplitude * torch.sin(x + phase)
        weights = adapt(learner, x, y, temperature=1.0 - step / 50)
        loss = loss + ((learner.run(x, weights) - y) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
