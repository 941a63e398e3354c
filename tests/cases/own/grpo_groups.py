import torch
import torch.nn as nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, TensorDataset


class PromptPolicy(nn.Module):
    def __init__(self, d=8, actions=5, hidden=24):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(d, hidden), nn.Tanh())
        self.logits = nn.Linear(hidden, actions)

    def forward(self, x):
        return Categorical(logits=self.logits(self.body(x)))


def rollouts(n=41):
    g = torch.Generator().manual_seed(29)
    prompt = torch.randn(n, 8, generator=g)
    action = torch.randint(0, 5, (n,), generator=g)
    reward = (action == prompt[:, :5].argmax(1)).float() + 0.1 * torch.rand(n, generator=g)
    return TensorDataset(prompt, action, reward)


def group_advantage(reward, eps=1e-6):
    return (reward - reward.mean()) / (reward.std() + eps)


def policy_loss(dist, action, advantage, entropy_coef=0.01):
    return -(dist.log_prob(action) * advantage).mean() - entropy_coef * dist.entropy().mean()


def main():
    torch.manual_seed(0)
    policy = PromptPolicy()
    opt = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for step, (prompt, action, reward) in enumerate(DataLoader(rollouts(), batch_size=8)):
        advantage = group_advantage(reward)
        loss = policy_loss(policy(prompt), action, advantage)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
