import torch
import torch.nn as nn
from torch.distributions import Categorical


class MaskedPolicy(nn.Module):
    def __init__(self, obs=8, actions=6, h=24):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, h), nn.Tanh())
        self.pi, self.v = nn.Linear(h, actions), nn.Linear(h, 1)

    def forward(self, obs, legal):
        h = self.body(obs)
        logits = self.pi(h).masked_fill(~legal, float("-inf"))
        return Categorical(logits=logits), self.v(h).squeeze(1)


def shortest_paths(adj):
    dist = torch.where(adj, 1.0, float("inf"))
    dist.fill_diagonal_(0.0)
    for k in range(adj.shape[0]):
        dist = torch.minimum(dist, dist[:, k:k + 1] + dist[k:k + 1])
    return dist


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(5)
    model = MaskedPolicy()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.StepLR(opt, 4, gamma=0.5)
    for step in range(12):
        obs = torch.randn(10, 8, generator=g)
        legal = torch.rand(10, 6, generator=g) < 0.4
        legal[:, 0] = True
        legal[3, 1:] = False  # only the pass move is left
        closeness = torch.exp(-shortest_paths(torch.rand(6, 6, generator=g) < 0.15))
        dist, value = model(obs, legal)
        action = dist.sample()
        reward = closeness[action, 0] + obs[:, 0].sign() * (action == 2)
        advantage = reward - value.detach()
        loss = (
            -(dist.log_prob(action) * advantage).mean()
            + 0.5 * (reward - value).pow(2).mean()
            - 0.01 * dist.entropy().mean()
        )
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
