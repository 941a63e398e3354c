import torch
from torch import nn, Tensor
import torch.nn.functional as F


def soft_argmax(heat: Tensor, beta: float = 10.0) -> Tensor:
    b, k, h, w = heat.shape
    p = (beta * heat).flatten(2).softmax(-1).view(b, k, h, w)
    ys = torch.linspace(0, 1, h, device=heat.device)
    xs = torch.linspace(0, 1, w, device=heat.device)
    return torch.stack([(p.sum(2) * xs).sum(-1), (p.sum(3) * ys).sum(-1)], -1)


def visible_l1(pred: Tensor, gt: Tensor, vis: Tensor) -> Tensor:
    err = (pred - gt).abs().sum(-1) * vis
    return (err.sum(1) / vis.sum(1)).mean()


def bone_length(kp: Tensor, parents: list[int]) -> Tensor:
    d = kp - kp[:, parents]
    return d.pow(2).sum(-1) ** 0.5


def bone_direction(kp: Tensor, parents: list[int]) -> Tensor:
    d = kp - kp[:, parents]
    return F.normalize(d, dim=-1, eps=1e-6)


class PoseLoss(nn.Module):
    def __init__(self, parents: list[int], w: float = 0.1):
        super().__init__()
        self.parents, self.w = parents, w

    def forward(self, heat, gt, vis):
        kp = soft_argmax(heat)
        bones = F.l1_loss(bone_length(kp, self.parents), bone_length(gt, self.parents))
        return visible_l1(kp, gt, vis) + self.w * bones
