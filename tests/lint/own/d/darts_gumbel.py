import torch
from torch import nn
import torch.nn.functional as F


class MixedOp(nn.Module):
    def __init__(self, ops):
        super().__init__()
        self.ops = nn.ModuleList(ops)
        self.alpha = nn.Parameter(1e-3 * torch.randn(len(ops)))

    def weights(self, tau):
        g = -torch.log(-torch.log(torch.rand_like(self.alpha)))
        return F.softmax((self.alpha + g) / tau, dim=-1)

    def forward(self, x, tau=1.0):
        w = self.weights(tau)
        return sum(wi * op(x) for wi, op in zip(w, self.ops))


def search(net, train_loader, val_loader, epochs=50):
    arch = [p for n, p in net.named_parameters() if n.endswith("alpha")]
    rest = [p for n, p in net.named_parameters() if not n.endswith("alpha")]
    w_opt = torch.optim.SGD(rest, 0.025, momentum=0.9, weight_decay=3e-4)
    a_opt = torch.optim.Adam(arch, 3e-4, betas=(0.5, 0.999), weight_decay=1e-3)
    for epoch in range(epochs):
        tau = max(0.1, 1.0 - epoch / epochs)
        for (x, y), (xv, yv) in zip(train_loader, val_loader):
            with torch.autograd.detect_anomaly():
                a_opt.zero_grad()
                F.cross_entropy(net(xv, tau), yv).backward()
                a_opt.step()
            w_opt.zero_grad()
            F.cross_entropy(net(x, tau), y).backward()
            nn.utils.clip_grad_norm_(rest, 5.0)
            w_opt.step()
