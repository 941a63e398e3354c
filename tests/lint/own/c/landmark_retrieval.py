import torch
import torch.nn.functional as F
from torch import nn


class GeM(nn.Module):
    def __init__(self, p: float = 3.0, eps: float = 1e-6):
        super().__init__()
        self.p = nn.Parameter(torch.tensor(p))
        self.eps = eps

    def forward(self, x):
        p = self.p.clamp(1.0, 5.0)
        return F.avg_pool2d(x.clamp(min=self.eps).pow(p), x.shape[-2:]).pow(1.0 / p).flatten(1)


class Whiten(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.fc = nn.Linear(d_in, d_out)

    def forward(self, x):
        return F.normalize(self.fc(F.normalize(x, dim=-1)), dim=-1)


def smooth_ap(sim: torch.Tensor, pos: torch.Tensor, tau: float = 0.01) -> torch.Tensor:
    diff = sim[:, None, :] - sim[:, :, None]
    s = torch.sigmoid(diff / tau) * (1 - torch.eye(sim.size(1), device=sim.device))
    rank_all = s.sum(-1) + 1
    rank_pos = (s * pos[:, None, :]).sum(-1) + 1
    ap = (rank_pos / rank_all * pos).sum(-1) / pos.sum(-1).clamp(min=1)
    return 1 - ap.mean()


def contrastive(d2: torch.Tensor, same: torch.Tensor, margin: float = 0.7) -> torch.Tensor:
    d = torch.sqrt(d2 + 1e-9)
    return (same * d2 + (1 - same) * F.relu(margin - d).pow(2)).mean()


@torch.no_grad()
def query_expand(q, db, k=3, alpha=3.0):
    sim, idx = (q @ db.T).topk(k, dim=1)
    w = sim.clamp(min=0).pow(alpha).unsqueeze(-1)
    return F.normalize(q + (w * db[idx]).sum(1), dim=-1)
