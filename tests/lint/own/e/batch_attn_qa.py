import torch
from torch import nn
import torch.nn.functional as F


class SpanReader(nn.Module):
    def __init__(self, d: int, heads: int = 8):
        super().__init__()
        self.heads, self.hd = heads, d // heads
        self.qkv = nn.Linear(d, 3 * d)
        self.span = nn.Linear(d, 2)

    def attend(self, x, keep):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, self.hd).permute(2, 0, 3, 1, 4)
        scores = torch.einsum("bhid,bhjd->bhij", q, k) * self.hd ** -0.5
        scores = scores.masked_fill(~keep[:, None, None, :], -torch.inf)
        if torch.isinf(scores).all():
            return torch.zeros_like(x)
        w = scores.softmax(-1)
        return (w @ v).transpose(1, 2).reshape(b, t, d)

    def forward(self, x, keep):
        return self.span(x + self.attend(x, keep)).unbind(-1)


def span_loss(start, end, ys, ye):
    limit = start.size(1)
    ys = torch.clamp(ys, 0, limit - 1)
    ye = torch.clamp(ye, 0, limit - 1)
    return 0.5 * (F.cross_entropy(start, ys) + F.cross_entropy(end, ye))


def train(net, loader, opt):
    for x, keep, ys, ye in loader:
        start, end = net(x, keep)
        loss = span_loss(start, end, ys, ye)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
