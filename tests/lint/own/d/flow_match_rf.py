import torch
from torch import nn
import torch.nn.functional as F


class AdaBlock(nn.Module):
    def __init__(self, d, heads=8):
        super().__init__()
        self.att = nn.MultiheadAttention(d, heads, batch_first=True)
        self.n = nn.LayerNorm(d, elementwise_affine=False)
        self.ada = nn.Linear(d, 3 * d)
        nn.init.zeros_(self.ada.weight)
        nn.init.zeros_(self.ada.bias)

    def forward(self, x, c, pad):
        shift, scale, gate = self.ada(F.silu(c)).unsqueeze(1).chunk(3, -1)
        h = self.n(x) * (1 + scale) + shift
        h, _ = self.att(h, h, h, key_padding_mask=pad)
        h = torch.nan_to_num(h, nan=0.0, posinf=0.0, neginf=0.0)
        return x + gate * h


def rf_loss(model, x1, cond):
    x0 = torch.randn_like(x1)
    t = torch.sigmoid(torch.randn(x1.size(0), device=x1.device))
    xt = torch.lerp(x0, x1, t.view(-1, 1, 1))
    return F.mse_loss(model(xt, t, cond), x1 - x0)


def train(model, loader, opt, steps):
    for p in model.parameters():
        p.register_hook(lambda g: torch.nan_to_num(g, nan=0.0))
    for step, (x1, cond) in zip(range(steps), loader):
        loss = rf_loss(model, x1, cond)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
