import torch
from torch import nn
import torch.nn.functional as F


class MAE(nn.Module):
    def __init__(self, patches: int, d: int = 768, heads: int = 12, depth: int = 12, pix: int = 768):
        super().__init__()
        self.pos = nn.Parameter(torch.zeros(1, patches, d))
        self.mask_token = nn.Parameter(torch.empty(1, 1, d))
        self.embed = nn.Linear(pix, d)
        layer = nn.TransformerEncoderLayer(d, heads, 4 * d, batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, depth)
        self.dec = nn.Linear(d, pix)
        nn.init.trunc_normal_(self.pos, std=0.02)
        nn.init.normal_(self.mask_token, std=0.02)

    def forward(self, patches, ratio: float = 0.75):
        b, n, _ = patches.shape
        keep = torch.rand(b, n, device=patches.device).argsort(1)[:, : int(n * (1 - ratio))]
        mask = torch.ones(b, n, device=patches.device).scatter(1, keep, 0.0)
        x = torch.where(mask.unsqueeze(-1).bool(), self.mask_token, self.embed(patches)) + self.pos
        pred = self.dec(self.enc(x))
        mean = patches.mean(-1, keepdim=True)
        var = patches.var(-1, keepdim=True, unbiased=False)
        target = (patches - mean) / (var + 1e-6).sqrt()
        err = (pred - target).square().mean(-1)
        return (err * mask).sum() / mask.sum().clamp(min=1.0)


def train(model, loader, opt, sched, scaler):
    for patches in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(patches.float().cuda())
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 3.0)
        scaler.step(opt)
        scaler.update()
        sched.step()
