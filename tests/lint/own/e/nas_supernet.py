import torch
from torch import nn
import torch.nn.functional as F


class MixedOp(nn.Module):
    def __init__(self, ops: list[nn.Module]):
        super().__init__()
        self.ops = nn.ModuleList(ops)
        self.alpha = nn.Parameter(1e-3 * torch.randn(len(ops)))

    def forward(self, x, tau: float):
        u = torch.zeros_like(self.alpha).uniform_()
        gumbel = -(-u.log()).log()
        w = F.softmax((self.alpha + gumbel) / tau, dim=-1)
        return sum(wi * op(x) for wi, op in zip(w, self.ops))


def arch_entropy(alpha):
    p = F.softmax(alpha, dim=-1)
    return -(p * p.log()).sum()


def latency(alphas, table):
    return sum((a.softmax(-1) * t).sum() for a, t in zip(alphas, table))


def search_step(net, train_batch, val_batch, opt_w, opt_a, tau, table):
    x, y = val_batch
    alphas = [m.alpha for m in net.modules() if isinstance(m, MixedOp)]
    loss_a = F.cross_entropy(net(x, tau), y) + 0.01 * latency(alphas, table)
    loss_a = loss_a + 1e-3 * sum(arch_entropy(a) for a in alphas)
    opt_a.zero_grad()
    loss_a.backward()
    opt_a.step()

    x, y = train_batch
    loss_w = F.cross_entropy(net(x, tau), y)
    opt_w.zero_grad()
    loss_w.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 5.0)
    opt_w.step()
    return loss_w.item(), loss_a.item()
