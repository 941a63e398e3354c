"""Kernels, divergences and evaluation numbers."""
import math

import torch as th
from torch import Tensor


def rbf(x: Tensor, y: Tensor, sigma: float) -> Tensor:
    return th.exp(-th.cdist(x, y).square() / (2 * sigma ** 2))


def mmd2(x: Tensor, y: Tensor, sigmas=(1.0, 2.0, 4.0)) -> Tensor:
    return sum(rbf(x, x, s).mean() + rbf(y, y, s).mean() - 2 * rbf(x, y, s).mean() for s in sigmas)


def js(p: Tensor, q: Tensor, eps: float = 1e-8) -> Tensor:
    p, q = p.clamp(min=eps), q.clamp(min=eps)
    m = 0.5 * (p + q)
    kl = lambda a, b: (a * (a / b).log()).sum(-1)
    return 0.5 * kl(p, m) + 0.5 * kl(q, m)


def gaussian_kl(mu1: Tensor, s1: Tensor, mu2: Tensor, s2: Tensor) -> Tensor:
    s1, s2 = s1.clamp(min=1e-4), s2.clamp(min=1e-4)
    return (th.log(s2 / s1) + (s1 ** 2 + (mu1 - mu2) ** 2) / (2 * s2 ** 2) - 0.5).sum(-1)


def logmeanexp(x: Tensor, dim: int = 0) -> Tensor:
    return th.logsumexp(x, dim) - math.log(x.size(dim))


def pearson(x: Tensor, y: Tensor) -> Tensor:
    x, y = x - x.mean(), y - y.mean()
    return (x * y).sum() / (x.norm() * y.norm()).clamp_min(1e-8)


def mix_nll(logit_pi: Tensor, mu: Tensor, raw_sigma: Tensor, y: Tensor) -> Tensor:
    sigma = th.nn.functional.softplus(raw_sigma) + 1e-3
    comp = -0.5 * ((y[:, None] - mu) / sigma) ** 2 - sigma.log() - 0.5 * math.log(2 * math.pi)
    return -th.logsumexp(th.log_softmax(logit_pi, -1) + comp, -1).mean()


@th.no_grad()
def psnr(a: Tensor, b: Tensor) -> float:
    mse = (a - b).square().mean().item()
    return 99.0 if mse == 0 else -10.0 * math.log10(mse)


@th.no_grad()
def geodesic_deg(Ra: Tensor, Rb: Tensor) -> Tensor:
    c = ((Ra.mT @ Rb).diagonal(dim1=-2, dim2=-1).sum(-1) - 1) / 2
    return th.rad2deg(th.acos(c.clamp(-1.0, 1.0)))


def rmse_of(errors) -> float:
    return (sum(e * e for e in errors) / max(len(errors), 1)) ** 0.5
