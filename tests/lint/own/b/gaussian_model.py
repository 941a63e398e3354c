import numpy as np
import torch
from torch import nn
import torch.nn.functional as F


def inverse_sigmoid(x):
    return torch.log(x / (1 - x))


def build_rotation(q):
    q = q / q.norm(dim=1, keepdim=True)
    r, x, y, z = q.unbind(1)
    return torch.stack([
        1 - 2 * (y * y + z * z), 2 * (x * y - r * z), 2 * (x * z + r * y),
        2 * (x * y + r * z), 1 - 2 * (x * x + z * z), 2 * (y * z - r * x),
        2 * (x * z - r * y), 2 * (y * z + r * x), 1 - 2 * (x * x + y * y),
    ], 1).view(-1, 3, 3)


class GaussianModel(nn.Module):
    def __init__(self, pts: np.ndarray, sh_degree: int = 3):
        super().__init__()
        n = len(pts)
        self.xyz = nn.Parameter(torch.from_numpy(pts).float())
        self.scale = nn.Parameter(torch.full((n, 3), -4.0))
        self.rot = nn.Parameter(torch.zeros(n, 4))
        self.sh = nn.Parameter(torch.empty(n, (sh_degree + 1) ** 2, 3))
        self.opacity = nn.Parameter(inverse_sigmoid(torch.full((n, 1), 0.1)))
        with torch.no_grad():
            self.rot[:, 0] = 1.0
            self.sh.zero_()

    @property
    def covariance(self):
        s = torch.diag_embed(F.softplus(self.scale))
        m = build_rotation(self.rot) @ s
        return m @ m.transpose(1, 2)

    @torch.no_grad()
    def reset_opacity(self, cap=0.01):
        o = torch.sigmoid(self.opacity)
        self.opacity.copy_(inverse_sigmoid(o.clamp(max=cap)))
