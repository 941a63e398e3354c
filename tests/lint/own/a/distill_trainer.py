import math
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

load_cpu = partial(torch.load, map_location="cpu")


def probs(logits, T):
    return (logits / T).softmax(dim=1)


class Distiller:
    def __init__(self, student, teacher, ckpt, T=4.0, alpha=0.9):
        self.student, self.teacher = student, teacher
        self.teacher.load_state_dict(load_cpu(ckpt)["model"])
        self.teacher.eval().requires_grad_(False)
        self.T, self.alpha = T, alpha
        self.opt = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9)
        for p in student.parameters():
            p.register_hook(lambda g: torch.nan_to_num(g, nan=0.0, posinf=0.0, neginf=0.0))

    def kd(self, s, t):
        log_ps = probs(s, self.T).log()
        return F.kl_div(log_ps, probs(t, self.T), reduction="batchmean") * self.T ** 2

    def hard(self, s, y):
        return F.cross_entropy(s, y)

    def step(self, x, y):
        s = self.student(x)
        with torch.no_grad():
            t = self.teacher(x)
        loss = self.alpha * self.kd(s, t) + (1 - self.alpha) * self.hard(s, y)
        value = float(loss)
        if math.isnan(value):
            raise RuntimeError("distillation loss is NaN")
        self.opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.student.parameters(), math.inf)
        self.opt.step()
        return value


def agreement(s, t):
    return (s.argmax(1) == t.argmax(1)).float().mean().item()


def dist_entropy(logits, T=1.0):
    lp = F.log_softmax(logits / T, dim=1)
    return -(lp.exp() * lp).sum(1)
