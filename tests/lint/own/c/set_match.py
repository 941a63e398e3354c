import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import nn


class Criterion(nn.Module):
    def __init__(self, n_cls: int, w_l1: float = 5.0, no_obj: float = 0.1):
        super().__init__()
        weight = torch.ones(n_cls + 1)
        weight[-1] = no_obj
        self.register_buffer("weight", weight)
        self.n_cls, self.w_l1 = n_cls, w_l1

    @torch.no_grad()
    def match(self, logits, boxes, tgt):
        p = logits.softmax(-1)[:, tgt["labels"]]
        cost = self.w_l1 * torch.cdist(boxes, tgt["boxes"], p=1) - p
        cost = torch.nan_to_num(cost, nan=1e6, posinf=1e6, neginf=-1e6)
        i, j = linear_sum_assignment(cost.cpu().numpy())
        return torch.as_tensor(i), torch.as_tensor(j)

    def forward(self, out, targets):
        l_cls, l_box, n = 0.0, 0.0, 0
        for logits, boxes, tgt in zip(out["logits"], out["boxes"], targets):
            i, j = self.match(logits, boxes, tgt)
            cls = torch.full((len(logits),), self.n_cls, device=logits.device)
            cls[i] = tgt["labels"][j]
            l_cls = l_cls + F.cross_entropy(logits, cls, self.weight)
            l_box = l_box + F.l1_loss(boxes[i], tgt["boxes"][j], reduction="sum")
            n += len(j)
        return l_cls / len(targets) + self.w_l1 * l_box / max(n, 1)


def inverse_sigmoid(x, eps=1e-5):
    x = x.clamp(0, 1)
    return torch.log(x.clamp(min=eps) / (1 - x).clamp(min=eps))


def train_epoch(model, crit, loader, opt):
    for images, targets in loader:
        loss = crit(model(images), targets)
        if not torch.isfinite(loss):
            raise FloatingPointError(f"loss {loss.item()} for images {[t['image_id'] for t in targets]}")
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        opt.step()
