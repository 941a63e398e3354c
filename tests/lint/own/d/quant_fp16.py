import torch
from torch import Tensor, nn


def absmax_quant(x: Tensor, bits: int = 8) -> tuple[Tensor, Tensor]:
    q = 2 ** (bits - 1) - 1
    scale = q / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    return (x * scale).round().clamp(-q, q), scale


def token_scales(h: Tensor) -> Tensor:
    h = h.to(torch.float16)
    amax = h.abs().amax(dim=-1, keepdim=True)
    return h / (amax + 1e-8)


def fake_quant(w: Tensor, bits: int = 4) -> Tensor:
    lo, hi = w.min(), w.max()
    step = (hi - lo) / (2 ** bits - 1)
    q = ((w - lo) / step).round() * step + lo
    return w + (q - w).detach()


class BitLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        s = 1.0 / self.weight.abs().mean().clamp(min=1e-5)
        w = (self.weight * s).round().clamp(-1, 1) / s
        w = self.weight + (w - self.weight).detach()
        xq, xs = absmax_quant(x)
        x = x + (xq / xs - x).detach()
        return nn.functional.linear(x, w, self.bias)


@torch.no_grad()
def calibrate(net: nn.Module, loader):
    stats = {}
    for name, m in net.named_modules():
        if isinstance(m, nn.Linear):
            m.register_forward_hook(lambda mod, i, o, n=name: stats.setdefault(n, []).append(o.abs().max().item()))
    for x in loader:
        net(x)
    return {k: max(v) for k, v in stats.items()}
