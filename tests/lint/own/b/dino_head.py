import torch
import torch.nn.functional as F
from torch import nn


class DINOHead(nn.Module):
    def __init__(self, in_dim, out_dim, bottleneck=256):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(in_dim, 2048), nn.GELU(), nn.Linear(2048, bottleneck))
        self.last = nn.Parameter(torch.empty(out_dim, bottleneck))
        nn.init.trunc_normal_(self.last, std=0.02)

    def forward(self, x):
        x = F.normalize(self.mlp(x), dim=-1, p=2)
        return x @ F.normalize(self.last, dim=-1).t()


class DINOLoss(nn.Module):
    def __init__(self, out_dim, student_temp=0.1, momentum=0.9):
        super().__init__()
        self.t, self.m = student_temp, momentum
        self.register_buffer("center", torch.zeros(1, out_dim))

    def forward(self, student, teacher, teacher_temp):
        s = (student / self.t).chunk(2)
        q = F.softmax((teacher - self.center) / teacher_temp, dim=-1).detach().chunk(2)
        loss = -(q[0] * F.log_softmax(s[1], -1)).sum(-1).mean() - (q[1] * F.log_softmax(s[0], -1)).sum(-1).mean()
        self.update_center(teacher)
        return loss / 2

    @torch.no_grad()
    def update_center(self, teacher):
        self.center.lerp_(teacher.mean(0, keepdim=True), 1 - self.m)


def freeze_last_layer(epoch, model, until=1):
    if epoch >= until:
        return
    for name, p in model.named_parameters():
        if "last" in name and p.grad is not None:
            p.grad.zero_()


def train_one_epoch(student, teacher, crit, loader, opt, epoch, ema=0.996):
    for views in loader:
        with torch.no_grad():
            t_out = teacher(torch.cat(views[:2]))
        loss = crit(student(torch.cat(views[:2])), t_out, 0.04)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 3.0)
        freeze_last_layer(epoch, student)
        opt.step()
        with torch.no_grad():
            for ps, pt in zip(student.parameters(), teacher.parameters()):
                pt.lerp_(ps, 1 - ema)
