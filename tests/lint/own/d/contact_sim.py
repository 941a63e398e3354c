import torch
from torch import Tensor, nn


def friction(v: Tensor, normal: Tensor, mu: float = 0.5) -> Tensor:
    speed = v.norm(dim=-1, keepdim=True)
    direction = torch.where(speed > 1e-6, v / speed, torch.zeros_like(v))
    return -mu * normal * direction


def penetration(x: Tensor, y: Tensor, radius: float) -> Tensor:
    d = torch.cdist(x, y)
    return torch.relu(2 * radius - d)


def rolling_time(h: Tensor, g: float = 9.81) -> Tensor:
    return torch.where(h > 0, torch.sqrt(2 * h / g), torch.zeros_like(h))


def fall_time(h: Tensor, g: float = 9.81) -> Tensor:
    up = h > 0
    safe = torch.where(up, h, torch.ones_like(h))
    return torch.where(up, torch.sqrt(2 * safe / g), torch.zeros_like(h))


def tilt(a: Tensor, b: Tensor) -> Tensor:
    cos = (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1)).clamp(min=1e-8)
    return cos.clip(-1, 1).acos()


class Controller(nn.Module):
    def __init__(self, obs, act):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(obs, 64), nn.Tanh(), nn.Linear(64, act), nn.Tanh())

    def forward(self, o):
        return self.net(o)


def rollout(ctrl, state, dynamics, horizon=50):
    cost = 0.0
    for _ in range(horizon):
        state = dynamics(state, ctrl(state))
        cost = cost + state.pow(2).sum(-1).mean()
    return cost / horizon
