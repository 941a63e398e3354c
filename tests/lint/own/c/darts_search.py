import torch
from torch import nn


def gumbel_like(x: torch.Tensor) -> torch.Tensor:
    u = torch.zeros_like(x).uniform_()
    return -torch.log(-torch.log(u))


def gumbel_safe(x: torch.Tensor) -> torch.Tensor:
    u = torch.rand_like(x).clamp(1e-6, 1 - 1e-6)
    return -torch.log(-torch.log(u))


class MixedOp(nn.Module):
    def __init__(self, ops: list[nn.Module]):
        super().__init__()
        self.ops = nn.ModuleList(ops)
        self.alpha = nn.Parameter(1e-3 * torch.randn(len(ops)))
        self.tau = 5.0

    def forward(self, x):
        w = torch.softmax((self.alpha + gumbel_like(self.alpha)) / self.tau, 0)
        return sum(wi * op(x) for wi, op in zip(w, self.ops))


def search(net, w_loader, a_loader, epochs=50):
    torch.autograd.set_detect_anomaly(mode=True)
    alphas = [m.alpha for m in net.modules() if isinstance(m, MixedOp)]
    ids = {id(a) for a in alphas}
    weights = [p for p in net.parameters() if id(p) not in ids]
    opt_w = torch.optim.SGD(weights, lr=0.025, momentum=0.9, weight_decay=3e-4)
    opt_a = torch.optim.Adam(alphas, lr=3e-4, betas=(0.5, 0.999))
    ce = nn.CrossEntropyLoss()
    for epoch in range(epochs):
        for (x, y), (xa, ya) in zip(w_loader, a_loader):
            opt_a.zero_grad()
            ce(net(xa), ya).backward()
            opt_a.step()
            opt_w.zero_grad()
            loss = ce(net(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(weights, 5.0)
            opt_w.step()
        print(epoch, loss.item(), [a.argmax().item() for a in alphas])
