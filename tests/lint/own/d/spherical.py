import torch
from torch import Tensor, nn


def to_spherical(xyz: Tensor) -> tuple[Tensor, Tensor]:
    r = xyz.norm(dim=-1).clamp(min=1e-6)
    lat = torch.asin((xyz[..., 2] / r).clamp(-1, 1))
    lon = torch.atan2(xyz[..., 1], xyz[..., 0])
    return lat, lon


def great_circle(a: Tensor, b: Tensor) -> Tensor:
    cos = nn.functional.cosine_similarity(a, b, dim=-1)
    return torch.arccos(cos.clip(-1 + 1e-6, 1 - 1e-6))


def haversine(lat1, lon1, lat2, lon2):
    h = torch.sin((lat1 - lat2) / 2).pow(2) + lat1.cos() * lat2.cos() * torch.sin((lon1 - lon2) / 2).pow(2)
    return 2 * torch.asin(h.clamp(1e-9, 1 - 1e-6).sqrt())


class GeoHead(nn.Module):
    def __init__(self, d: int):
        super().__init__()
        self.fc = nn.Linear(d, 3)

    def forward(self, h):
        p = self.fc(h)
        p = p / torch.linalg.vector_norm(p, dim=-1, keepdim=True)
        return to_spherical(p)


def vmf_loss(mu: Tensor, target: Tensor, kappa: float = 20.0) -> Tensor:
    return (kappa * (1 - (mu * target).sum(-1))).mean()
