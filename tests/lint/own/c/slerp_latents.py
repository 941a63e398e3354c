import torch
from torch import Tensor, nn


def slerp(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
    a_n = a / torch.norm(a, dim=-1, keepdim=True)
    b_n = b / torch.norm(b, dim=-1, keepdim=True)
    dot = (a_n * b_n).sum(-1, keepdim=True)
    omega = torch.arccos(torch.clamp(dot, min=-1.0, max=1.0))
    so = torch.sin(omega).clamp(min=1e-6)
    return torch.sin((1.0 - t) * omega) / so * a + torch.sin(t * omega) / so * b


def lerp(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
    return a + t * (b - a)


class PathRegulariser(nn.Module):
    """Perceptual path length between two latents, differentiable in the mapping network."""

    def __init__(self, mapping: nn.Module, synth: nn.Module, lpips: nn.Module, eps: float = 1e-2):
        super().__init__()
        self.mapping, self.synth, self.lpips, self.eps = mapping, synth, lpips, eps

    def forward(self, n: int, device) -> Tensor:
        z = torch.randn(2, n, self.mapping.z_dim, device=device)
        w = self.mapping(z.flatten(0, 1)).view(2, n, -1)
        t = torch.rand(n, 1, device=device)
        w0 = slerp(w[0], w[1], t)
        w1 = slerp(w[0], w[1], t + self.eps)
        d = self.lpips(self.synth(w0), self.synth(w1))
        return (d / self.eps ** 2).mean()


def truncate(w: Tensor, w_avg: Tensor, psi: float = 0.7) -> Tensor:
    return w_avg.lerp(w, psi)
