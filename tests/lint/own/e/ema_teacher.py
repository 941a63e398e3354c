import copy
import torch
from torch import nn
import torch.nn.functional as F


class MeanTeacher:
    def __init__(self, student: nn.Module, decay: float = 0.999):
        self.student = student
        self.teacher = copy.deepcopy(student).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, step: int):
        d = min(self.decay, 1 - 1 / (step + 1))
        for pt, ps in zip(self.teacher.parameters(), self.student.parameters()):
            pt.mul_(d).add_(ps, alpha=1 - d)

    def consistency(self, x_weak, x_strong, threshold: float = 0.95):
        with torch.no_grad():
            conf, pseudo = self.teacher(x_weak).softmax(-1).max(-1)
            keep = (conf >= threshold).float()
        per = F.cross_entropy(self.student(x_strong), pseudo, reduction="none")
        return (per * keep).sum() / keep.sum().clamp(min=1.0)


def ramp_up(step: int, length: int = 4000) -> float:
    t = min(step / length, 1.0)
    return float(torch.exp(torch.tensor(-5.0 * (1 - t) ** 2)))


def train(mt: MeanTeacher, labelled, unlabelled, opt, steps: int = 50_000):
    for step, ((x, y), (w, s)) in enumerate(zip(labelled, unlabelled)):
        if step >= steps:
            break
        loss = F.cross_entropy(mt.student(x), y) + ramp_up(step) * mt.consistency(w, s)
        if not torch.isfinite(loss):
            raise FloatingPointError(f"loss {loss.item()} at step {step}")
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        mt.update(step)
