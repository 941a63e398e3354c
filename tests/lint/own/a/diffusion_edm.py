import torch
from torch import Tensor, nn


class EDMLoss(nn.Module):
    def __init__(self, p_mean: float = -1.2, p_std: float = 1.2, sigma_data: float = 0.5):
        super().__init__()
        self.p_mean, self.p_std, self.sd = p_mean, p_std, sigma_data

    def forward(self, net, x: Tensor) -> Tensor:
        rnd = torch.randn(x.size(0), 1, 1, 1, device=x.device)
        sigma = (rnd * self.p_std + self.p_mean).clamp(-8.0, 8.0).exp()
        weight = (sigma ** 2 + self.sd ** 2) / (sigma * self.sd) ** 2
        out = precond(net, x + sigma * torch.randn_like(x), sigma, self.sd)
        return (weight * (out - x) ** 2).mean()


def precond(net, x: Tensor, sigma: Tensor, sd: float) -> Tensor:
    s2 = sigma ** 2 + sd ** 2
    c_skip, c_out, c_in = sd ** 2 / s2, sigma * sd / s2.sqrt(), s2.rsqrt()
    return c_skip * x + c_out * net(c_in * x, sigma.log().flatten() / 4)


def timestep_embedding(t: Tensor, dim: int, period: float = 10000.0) -> Tensor:
    half = dim // 2
    freqs = torch.exp(-torch.log(torch.tensor(period)) * torch.arange(half) / half).to(t.device)
    arg = t[:, None].float() * freqs[None]
    return torch.cat([arg.cos(), arg.sin()], -1)


def cosine_schedule(n: int, s: float = 8e-3) -> Tensor:
    t = torch.linspace(0, 1, n + 1)
    f = torch.cos((t + s) / (1 + s) * torch.pi / 2) ** 2
    alpha_bar = f / f[0]
    return (1 - alpha_bar[1:] / alpha_bar[:-1]).clamp(max=0.999)


@torch.no_grad()
def heun(net, x: Tensor, sigmas: Tensor, sd: float = 0.5) -> Tensor:
    for s, s_next in zip(sigmas[:-1], sigmas[1:]):
        d = (x - precond(net, x, s.view(1), sd)) / s
        nxt = x + d * (s_next - s)
        if s_next > 0:
            d2 = (nxt - precond(net, nxt, s_next.view(1), sd)) / s_next
            nxt = x + 0.5 * (d + d2) * (s_next - s)
        x = nxt
    return x
