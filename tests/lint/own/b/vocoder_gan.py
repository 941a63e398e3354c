import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import weight_norm


class PeriodDisc(nn.Module):
    def __init__(self, period: int):
        super().__init__()
        self.period = period
        chans = [1, 32, 128, 512]
        self.convs = nn.ModuleList(weight_norm(nn.Conv2d(a, b, (5, 1), (3, 1), (2, 0))) for a, b in zip(chans, chans[1:]))
        self.post = weight_norm(nn.Conv2d(512, 1, (3, 1), 1, (1, 0)))

    def forward(self, x):
        b, c, t = x.shape
        x = F.pad(x, (0, -t % self.period), "reflect")
        x = x.view(b, c, -1, self.period)
        feats = []
        for conv in self.convs:
            x = F.leaky_relu(conv(x), 0.1)
            feats.append(x)
        return self.post(x).flatten(1), feats


def log_mel(mel_basis, spec):
    return torch.log(torch.clamp(mel_basis @ spec, min=1e-5))


def feature_loss(fr, fg):
    return sum(F.l1_loss(g, r.detach()) for r, g in zip(fr, fg))


def step(gen, disc, mel_fn, batch, opt_g, opt_d, lam=45.0):
    mel, wav = batch
    fake = gen(mel)
    real_s, real_f = disc(wav)
    fake_s, _ = disc(fake.detach())
    loss_d = ((1 - real_s) ** 2).mean() + (fake_s ** 2).mean()
    loss_d = torch.clamp(loss_d, 0.0, 8.0)
    opt_d.zero_grad()
    loss_d.backward()
    opt_d.step()

    fake_s, fake_f = disc(fake)
    loss_g = ((1 - fake_s) ** 2).mean() + 2 * feature_loss(real_f, fake_f) + lam * F.l1_loss(mel_fn(fake), mel)
    loss_g = torch.nan_to_num(loss_g, nan=0.0)
    opt_g.zero_grad()
    loss_g.backward()
    opt_g.step()
    return loss_d.item(), loss_g.item()
