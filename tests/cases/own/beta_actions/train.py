"""PPO-like update: actions in [0, 1] under a Beta policy; stored actions were clipped to the bound."""
import torch
from agent import Actor, logprob

torch.manual_seed(0)
actor = Actor(4)
optimizer = torch.optim.Adam(actor.parameters(), lr=3e-3)
obs = torch.randn(320, 4)
with torch.no_grad():
    action = actor.dist(obs).sample()
    action[203] = 1.2
action = action.clamp(0.0, 1.0)
advantage = torch.randn(320)
for step in range(40):
    rows = slice(step * 8, step * 8 + 8)
    loss = -(logprob(actor, obs[rows], action[rows]) * advantage[rows]).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(actor.parameters(), 0.5)
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
