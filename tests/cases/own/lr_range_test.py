import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Waves(Dataset):
    def __init__(self, n=240):
        g = torch.Generator().manual_seed(3)
        self.x = torch.rand(n, 3, generator=g) * 2 - 1
        self.y = torch.sin(3 * self.x[:, :1]) + self.x[:, 1:2] * self.x[:, 2:]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Residual(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        return x + self.fc2(torch.relu(self.fc1(x)))


class WaveNet(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.stem = nn.Linear(3, d)
        self.blocks = nn.Sequential(Residual(d), Residual(d))
        self.head = nn.Linear(d, 1)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)))


def main():
    torch.manual_seed(0)
    model = WaveNet()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    # "warm-up": meant to grow by 1.6 % per batch
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, gamma=1.6)
    for step, (x, y) in enumerate(DataLoader(Waves(), batch_size=10)):
        loss = nn.functional.huber_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
