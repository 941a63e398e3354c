import torch
import torch.nn as nn
import torch.nn.functional as F


class DuelingQ(nn.Module):
    def __init__(self, d=6, h=20, actions=3):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(d, h), nn.ReLU())
        self.value, self.adv = nn.Linear(h, 1), nn.Linear(h, actions)
        self.log_alpha = nn.Parameter(torch.tensor(0.0))

    def forward(self, s):
        h = self.body(s)
        adv = self.adv(h)
        return self.value(h) + adv - adv.mean(1, keepdim=True)


def td_loss(q, target_q, batch):
    s, a, r, s2 = batch
    chosen = q(s).gather(1, a.unsqueeze(1)).squeeze(1)
    with torch.no_grad():
        goal = r + 0.9 * target_q(s2).max(1).values
    return F.smooth_l1_loss(chosen, goal)


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(90)
    q, target_q = DuelingQ(), DuelingQ()
    target_q.load_state_dict(q.state_dict())
    opt = torch.optim.RMSprop(q.parameters(), lr=2e-4, alpha=0.5, eps=1e-5, centered=True)
    for step in range(30):
        s = torch.randn(16, 6, generator=g)
        batch = (s, torch.randint(0, 3, (16,), generator=g), s[:, 0], s + 0.1)
        loss = td_loss(q, target_q, batch) - 0.0123 * q.log_alpha
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 9:
            target_q.load_state_dict(q.state_dict())
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
