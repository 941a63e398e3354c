import torch
from torch import nn
import torch.nn.functional as F


class DINOHead(nn.Module):
    def __init__(self, d: int, out: int = 65536, bottleneck: int = 256):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(d, 2048), nn.GELU(), nn.Linear(2048, bottleneck))
        self.last = nn.Linear(bottleneck, out, bias=False)

    def forward(self, x):
        return self.last(F.normalize(self.mlp(x), dim=-1))


class DINOLoss(nn.Module):
    def __init__(self, out: int, t_student=0.1, t_teacher=0.04, momentum=0.9):
        super().__init__()
        self.ts, self.tt, self.m = t_student, t_teacher, momentum
        self.register_buffer("center", torch.zeros(1, out))

    def forward(self, student, teacher):
        log_p = torch.log(torch.softmax(student / self.ts, dim=-1))
        q = F.softmax((teacher - self.center) / self.tt, dim=-1).detach()
        loss = -(q * log_p).sum(-1).mean()
        self.update_center(teacher)
        return loss

    @torch.no_grad()
    def update_center(self, teacher):
        self.center.mul_(self.m).add_(teacher.mean(0, keepdim=True), alpha=1 - self.m)


def koleo(x):
    x = F.normalize(x, dim=-1)
    dots = x @ x.T
    dots.fill_diagonal_(-1)
    nn_idx = dots.argmax(1)
    d = F.pairwise_distance(x, x[nn_idx], eps=1e-8)
    return -torch.log(d + 1e-8).mean()
