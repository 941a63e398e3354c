import torch
import torch.nn as nn
from torch.distributions import Categorical


class CardAgent(nn.Module):
    def __init__(self, state=12, cards=10, hidden=32):
        super().__init__()
        self.torso = nn.Sequential(nn.Linear(state, hidden), nn.ReLU())
        self.actor = nn.Linear(hidden, cards)
        self.critic = nn.Linear(hidden, 1)

    def forward(self, state, in_hand):
        h = self.torso(state)
        logits = self.actor(h).masked_fill(~in_hand, float("-inf"))
        return Categorical(logits=logits), self.critic(h).squeeze(1)


def deal(g, n=16):
    state = torch.randn(n, 12, generator=g)
    in_hand = torch.rand(n, 10, generator=g) < 0.35
    in_hand[torch.arange(n), torch.randint(0, 10, (n,), generator=g)] = True
    in_hand[3] = False
    in_hand[3, 4] = True
    return state, in_hand


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(5)
    agent = CardAgent()
    opt = torch.optim.Adam(agent.parameters(), lr=5e-3)
    best = torch.tensor(float("-inf"))
    for step in range(10):
        state, in_hand = deal(g)
        dist, value = agent(state, in_hand)
        card = dist.sample()
        reward = torch.cos(state[:, 0] + card.float())
        advantage = (reward - value).detach()
        loss = (
            -(dist.log_prob(card) * advantage).mean()
            + 0.5 * (reward - value).pow(2).mean()
            - 0.01 * dist.entropy().mean()
        )
        opt.zero_grad()
        loss.backward()
        opt.step()
        best = torch.maximum(best, reward.mean())
        print(f"step {step} loss {loss.item():.4f} best {best.item():.4f}")


if __name__ == "__main__":
    main()
