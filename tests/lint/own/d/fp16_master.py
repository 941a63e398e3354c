import copy
import torch
from torch import nn
import torch.nn.functional as F


class MasterTrainer:
    """fp16 working copy, fp32 master weights."""

    def __init__(self, model: nn.Module, lr: float = 1e-3, scale: float = 1024.0):
        self.master = [p.detach().clone().float().requires_grad_(True) for p in model.parameters()]
        self.model = model.half().cuda()
        self.opt = torch.optim.AdamW(self.master, lr=lr)
        self.scale = scale

    def step(self, x, y):
        logits = self.model(x.cuda().half())
        loss = F.cross_entropy(logits.float(), y.cuda())
        self.model.zero_grad()
        (loss * self.scale).backward()
        for m, p in zip(self.master, self.model.parameters()):
            m.grad = p.grad.detach().float().cpu() / self.scale
        if not all(torch.isfinite(m.grad).all() for m in self.master):
            self.scale = max(self.scale / 2, 1.0)
            return None
        nn.utils.clip_grad_norm_(self.master, 1.0)
        self.opt.step()
        with torch.no_grad():
            for m, p in zip(self.master, self.model.parameters()):
                p.copy_(m)
        return loss.item()


def distill(student: nn.Module, teacher: nn.Module, loader, lr=3e-4, T=2.0):
    teacher = copy.deepcopy(teacher).half().eval()
    opt = torch.optim.Adam(student.parameters(), lr=lr)
    for x in loader:
        with torch.no_grad():
            q = teacher(x.half()).float().div(T).softmax(-1)
        loss = F.kl_div((student(x) / T).log_softmax(-1), q, reduction="batchmean") * T * T
        opt.zero_grad()
        loss.backward()
        opt.step()


def half_large_eps(net: nn.Module, x, y):
    net = net.half()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-4, eps=1e-4)
    F.mse_loss(net(x.half()).float(), y).backward()
    opt.step()
