import torch
from torch import Tensor


def segment_softmax(score: Tensor, seg: Tensor, n: int) -> Tensor:
    """Softmax inside each segment; every edge belongs to the segment of its own target node."""
    mx = torch.full((n,), float("-inf"), device=score.device).scatter_reduce(0, seg, score, "amax")
    e = torch.exp(score - mx[seg])
    z = torch.zeros(n, device=score.device).index_add(0, seg, e)
    return e / z[seg].clamp(min=1e-12)


def gcn_norm(edge: Tensor, n: int) -> Tensor:
    loops = torch.arange(n, device=edge.device).expand(2, -1)
    edge = torch.cat([edge, loops], 1)
    deg = torch.bincount(edge[1], minlength=n).float()
    inv = deg.pow(-0.5)
    return inv[edge[0]] * inv[edge[1]]


def mean_by_graph(h: Tensor, batch: Tensor, n: int) -> Tensor:
    s = torch.zeros(n, h.size(1), device=h.device).index_add(0, batch, h)
    c = torch.bincount(batch, minlength=n)
    return s / c.clamp(min=1).unsqueeze(-1)


def pair_norm(x: Tensor, scale: float = 1.0, eps: float = 1e-6) -> Tensor:
    x = x - x.mean(0)
    return scale * x / (eps + x.pow(2).sum(-1).mean()).sqrt()


def laplacian_pe(adj: Tensor, k: int) -> Tensor:
    deg = adj.sum(-1)
    isolated = deg == 0
    d = torch.where(isolated, torch.ones_like(deg), deg).rsqrt()
    d = d.masked_fill(isolated, 0.0)
    lap = torch.eye(adj.size(0), device=adj.device) - d[:, None] * adj * d[None]
    with torch.no_grad():
        vec = torch.linalg.eigh(lap).eigenvectors[:, 1:k + 1]
    return vec * torch.sign(torch.randn(vec.size(1), device=vec.device))


def link_loss(z: Tensor, pos: Tensor, neg: Tensor) -> Tensor:
    sp = (z[pos[0]] * z[pos[1]]).sum(-1)
    sn = (z[neg[0]] * z[neg[1]]).sum(-1)
    return -(torch.nn.functional.logsigmoid(sp).mean() + torch.nn.functional.logsigmoid(-sn).mean())


def hyper_dist(x: Tensor, y: Tensor, eps: float = 1e-5) -> Tensor:
    nx = (1 - x.pow(2).sum(-1)).clamp(min=eps)
    ny = (1 - y.pow(2).sum(-1)).clamp(min=eps)
    return torch.acosh(1 + eps + 2 * (x - y).pow(2).sum(-1) / (nx * ny))
