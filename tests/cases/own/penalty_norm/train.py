"""WGAN-GP critic on ring data; a dead interpolate has an all-zero gradient."""
import torch
from torch import nn
from critic import Critic, gradient_penalty

torch.manual_seed(4)
critic = Critic()
optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
real = torch.randn(640, 2)
real = real / real.norm(dim=1, keepdim=True)
for step in range(60):
    x = real[(step * 10) % 640 : (step * 10) % 640 + 10]
    fake = torch.randn(10, 2) * 0.1
    if step == 33:
        fake[4] = -90.0
        x = x.clone()
        x[4] = -90.0
    loss = critic(fake).mean() - critic(x).mean() + 10.0 * gradient_penalty(critic, x, fake)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
