import torch
from torch import nn
import torch.nn.functional as F


class GazeNet(nn.Module):
    def __init__(self, feat: int, hidden: int = 128):
        super().__init__()
        self.rnn = nn.LSTM(feat, hidden, batch_first=True)
        self.mean, self.logvar = nn.Linear(hidden, 2), nn.Linear(hidden, 2)

    def forward(self, x):
        h, _ = self.rnn(x)
        return self.mean(h), self.logvar(h)


def gaussian_nll(mu, logvar, y, mask):
    inv = torch.exp(-logvar)
    nll = 0.5 * (inv * (y - mu).pow(2) + logvar).sum(-1)
    return (nll * mask).sum() / (mask.sum() + 1e-8)


def fixation_scale(track, lengths):
    out = []
    for t, n in zip(track, lengths):
        seg = t[:n]
        out.append((seg - seg.mean(0)) / seg.var(dim=0).add(1e-6).sqrt())
    return out


def train(net, loader, epochs=40):
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(epochs):
        for x, y, mask in loader:
            mu, logvar = net(x)
            loss = gaussian_nll(mu, logvar, y, mask)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()


def entropy_of_bins(hist):
    p = hist / hist.sum(-1, keepdim=True).clamp(min=1)
    return -(p * torch.log2(p)).sum(-1)
