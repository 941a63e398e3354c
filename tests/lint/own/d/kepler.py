import torch
from torch import Tensor, nn


def true_anomaly(E: Tensor, e: Tensor) -> Tensor:
    cos_nu = (torch.cos(E) - e) / (1 - e * torch.cos(E)).clamp(min=1e-6)
    return torch.acos(cos_nu.clamp(-1.0, 1.0))


def half_angle(E: Tensor, e: Tensor) -> Tensor:
    e = e.clamp(0, 0.99)
    return 2 * torch.atan2(torch.sqrt(1 + e) * torch.sin(E / 2), torch.sqrt(1 - e) * torch.cos(E / 2))


def solve(M: Tensor, e: Tensor, iters: int = 10) -> Tensor:
    E = M.clone()
    for _ in range(iters):
        E = E - (E - e * torch.sin(E) - M) / (1 - e * torch.cos(E)).clamp(min=1e-3)
    return E


def stumpff(z: Tensor) -> Tensor:
    s = z.abs().clamp(min=1e-12).sqrt()
    return torch.where(z > 1e-6, (1 - torch.cos(s)) / z, torch.full_like(z, 0.5))


class OrbitNet(nn.Module):
    def __init__(self, n_obs: int):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(n_obs, 64), nn.SiLU(), nn.Linear(64, 2))

    def forward(self, obs: Tensor, M: Tensor) -> Tensor:
        raw_e, phase = self.f(obs).chunk(2, -1)
        e = 0.95 * torch.sigmoid(raw_e)
        return true_anomaly(solve(M + phase, e), e)


def fit(net, obs, M, nu, steps=2000):
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(steps):
        loss = (1 - torch.cos(net(obs, M) - nu)).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
