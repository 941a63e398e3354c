import math
import torch
from torch import nn
import torch.nn.functional as F


class MDN(nn.Module):
    def __init__(self, hidden: int = 400, k: int = 20):
        super().__init__()
        self.rnn = nn.LSTM(3, hidden, num_layers=2, batch_first=True)
        self.out = nn.Linear(hidden, 6 * k + 1)

    def forward(self, x, state=None):
        h, state = self.rnn(x, state)
        y = self.out(h)
        end, pi, mu1, mu2, s1, s2, rho = y[..., :1], *y[..., 1:].chunk(6, -1)
        s1, s2 = torch.exp(s1), torch.exp(s2)
        return end, F.log_softmax(pi, -1), mu1, mu2, s1, s2, torch.tanh(rho) * 0.95, state


def nll(params, target):
    end, log_pi, mu1, mu2, s1, s2, rho, _ = params
    x, y, e = target.unsqueeze(-1).unbind(-2)
    z1, z2 = (x - mu1) / s1, (y - mu2) / s2
    one = 1 - rho ** 2
    q = (z1 ** 2 + z2 ** 2 - 2 * rho * z1 * z2) / (2 * one)
    log_n = -q - math.log(2 * math.pi) - s1.log() - s2.log() - 0.5 * one.log()
    stroke = -torch.logsumexp(log_pi + log_n, -1).mean()
    return stroke + F.binary_cross_entropy_with_logits(end, e)


def train(model, loader, epochs=30):
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for seq in loader:
            loss = nll(model(seq[:, :-1]), seq[:, 1:])
            opt.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            opt.step()
