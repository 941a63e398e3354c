import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class JointAngles(nn.Module):
    """Bounded joint angles: asin of a squashed activation."""

    def __init__(self, d, joints):
        super().__init__()
        self.proj = nn.Linear(d, joints)

    def forward(self, h):
        sine = torch.tanh(self.proj(h))
        return torch.asin(sine)


class InverseKinematics(nn.Module):
    def __init__(self, joints=3, d=24):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, d), nn.ReLU(), nn.Linear(d, d), nn.ReLU())
        self.head = nn.ModuleList([JointAngles(d, joints)])

    def forward(self, xy):
        return self.head[0](self.body(xy))


def end_effector(angles):
    total = angles.cumsum(1)
    return torch.stack([total.cos().sum(1), total.sin().sum(1)], 1)


class Reach(Dataset):
    def __init__(self, n=56):
        g = torch.Generator().manual_seed(14)
        self.xy = end_effector(torch.rand(n, 3, generator=g) * 2 - 1)
        self.xy[38] *= 100.0  # this record is in centimetres

    def __len__(self):
        return len(self.xy)

    def __getitem__(self, i):
        return self.xy[i]


def main():
    torch.manual_seed(3)
    model = InverseKinematics()
    opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step, xy in enumerate(DataLoader(Reach(), batch_size=8)):
        loss = nn.functional.huber_loss(end_effector(model(xy)), xy)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
