import random

import torch
import torch.nn as nn
from torch.utils.tensorboard import SummaryWriter


class Encoder(nn.Module):
    def __init__(self, n, h):
        super().__init__()
        self.rnn = nn.GRU(n, h, 2, batch_first=True, dropout=0.1)

    def forward(self, x):
        return self.rnn(x)[1]


class Decoder(nn.Module):
    def __init__(self, n, h):
        super().__init__()
        self.rnn = nn.GRU(n, h, 2, batch_first=True, dropout=0.1)
        self.out = nn.Linear(h, n)

    def forward(self, x, h, steps, teacher=None, p=0.5):
        outs = []
        for t in range(steps):
            o, h = self.rnn(x, h)
            y = self.out(o)
            outs.append(y)
            x = teacher[:, t:t + 1] if teacher is not None and random.random() < p else y
        return torch.cat(outs, 1)


def masked_mae(pred, y, null=0.0):
    m = (y != null).float()
    m = m / m.mean()
    loss = (pred - y).abs() * m
    loss = torch.where(torch.isnan(loss), torch.zeros_like(loss), loss)
    return loss.mean()


torch.autograd.set_detect_anomaly(True)
writer = SummaryWriter()


def train(enc, dec, loader, epochs=100):
    opt = torch.optim.Adam([*enc.parameters(), *dec.parameters()], lr=1e-2)
    for epoch in range(epochs):
        for x, y in loader:
            pred = dec(x[:, -1:], enc(x), y.size(1), teacher=y, p=max(0.0, 1 - epoch / 50))
            loss = masked_mae(pred, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        writer.add_scalar("mae", loss.item(), epoch)
