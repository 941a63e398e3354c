import torch
import torch.nn as nn
import torch.nn.functional as F


class Policy(nn.Module):
    def __init__(self, obs_dim, n_actions):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(obs_dim, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, n_actions))

    def forward(self, obs, legal):
        logits = self.net(obs)
        return torch.where(legal, logits, torch.tensor(float("-inf"), device=logits.device))

    @torch.no_grad()
    def act(self, obs, legal):
        return self.net(obs).masked_fill(~legal, float("-inf")).argmax(-1)


def clone(policy, demos, epochs=20, lr=3e-4, device="cuda"):
    policy.to(device)
    opt = torch.optim.Adam(policy.parameters(), lr=lr)
    for epoch in range(epochs):
        hits, n, total = 0, 0, 0.0
        for obs, legal, action in demos:
            obs, legal, action = obs.to(device), legal.to(device), action.to(device)
            logits = policy(obs, legal)
            loss = F.cross_entropy(logits, action)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            opt.step()
            hits += (logits.argmax(-1) == action).sum().item()
            n += len(action)
            total += loss.item() * len(action)
        print(f"{epoch}: loss {total / max(n, 1):.4f} acc {hits / max(n, 1):.3f}")
