import torch
from torch import Tensor, nn
import torch.nn.functional as F


class DenseGAT(nn.Module):
    def __init__(self, d_in: int, d_out: int):
        super().__init__()
        self.lin = nn.Linear(d_in, d_out, bias=False)
        self.a_src = nn.Parameter(torch.empty(d_out, 1))
        self.a_dst = nn.Parameter(torch.empty(d_out, 1))
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.xavier_uniform_(p)

    def scores(self, x: Tensor):
        h = self.lin(x)
        return h, F.leaky_relu(h @ self.a_src + (h @ self.a_dst).transpose(-1, -2), 0.2)

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        h, e = self.scores(x)
        minus_inf = torch.full_like(e, float("-inf"))
        att = torch.where(adj > 0, e, minus_inf)
        att = F.softmax(att, dim=-1)
        return F.elu(att @ h)


class DenseGATSelfLoops(DenseGAT):
    def forward(self, x, adj):
        h, e = self.scores(x)
        adj = adj + torch.eye(adj.size(-1), device=adj.device)
        att = torch.where(adj > 0, e, torch.full_like(e, float("-inf")))
        return F.elu(F.softmax(att, dim=-1) @ h)


def mean_aggregate(h: Tensor, src: Tensor, dst: Tensor, n: int) -> Tensor:
    out = h.new_zeros(n, h.size(-1)).index_add_(0, dst, h[src])
    deg = torch.zeros(n, device=h.device).index_add_(0, dst, torch.ones_like(dst, dtype=h.dtype))
    return out / deg.unsqueeze(-1)


def sym_norm(adj: Tensor) -> Tensor:
    deg = adj.sum(-1).clamp(min=1.0)
    d = deg.rsqrt()
    return d[:, None] * adj * d[None, :]
