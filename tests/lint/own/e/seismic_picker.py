import torch
from torch import nn
import torch.nn.functional as F


class PhaseNet(nn.Module):
    def __init__(self, ch: int = 16, k: int = 7):
        super().__init__()
        self.down = nn.Conv1d(3, ch, k, padding=k // 2)
        self.mid = nn.Conv1d(ch, ch, k, padding=k // 2)
        self.up = nn.Conv1d(ch, 3, k, padding=k // 2)

    def forward(self, x):
        h = F.relu(self.down(x))
        h = F.relu(self.mid(h)) + h
        return self.up(h)


def demean(x):
    x = x - x.mean(-1, keepdim=True)
    return x / (x.abs().amax(-1, keepdim=True) + 1e-6)


def pick_loss(logits, target):
    lp = F.log_softmax(logits, dim=1)
    return -(target * lp).sum(1).mean()


def gaussian_label(n, idx, sigma=10.0):
    t = torch.arange(n, dtype=torch.float32)
    return torch.exp(-0.5 * ((t - idx) / sigma) ** 2)


def train(net, loader, epochs=40, device="cuda"):
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=3)
    for epoch in range(epochs):
        total, n = 0.0, 0
        for wav, tgt in loader:
            loss = pick_loss(net(demean(wav.to(device))), tgt.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
            total, n = total + loss.item(), n + 1
        sched.step(total / max(n, 1))
