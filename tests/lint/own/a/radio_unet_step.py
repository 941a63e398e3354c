import torch
import torch.nn as nn
import torch.nn.functional as F


class VLBWeightedLoss(nn.Module):
    def __init__(self, max_weight=100.0):
        super().__init__()
        self.max_weight = max_weight

    def forward(self, pred, noise, t):
        # t in (0, 1]
        w = ((t + 1) / t.clamp(min=1e-3).sqrt()).clamp(max=self.max_weight)
        per = F.mse_loss(pred, noise, reduction="none").flatten(1).mean(1)
        per = per.clamp(max=50.0)
        return (w * per).mean()


class Model(nn.Module):
    def __init__(self, unet, cond_enc):
        super().__init__()
        self.unet, self.cond_enc = unet, cond_enc

    def forward(self, x, t, cond):
        ctx = self.cond_enc(cond)
        ctx = ctx.nan_to_num(nan=0.0, posinf=1e4, neginf=-1e4)
        return self.unet(x, t, ctx)


def train_step(model, crit, batch, opt):
    x0, cond = batch
    t = torch.rand(x0.size(0), device=x0.device).clamp_(min=1e-4)
    noise = torch.randn_like(x0)
    xt = (1 - t)[:, None, None, None] * x0 + t[:, None, None, None] * noise
    loss_simple = crit(model(xt, t, cond), noise, t)
    loss = torch.nan_to_num(loss_simple, nan=0.0)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    opt.step()
    return {"loss_simple": loss_simple.item(), "total_loss": loss.item()}
