import math
import torch
from torch import nn, Tensor


class LogMel(nn.Module):
    def __init__(self, mel: nn.Module, floor: float = 1e-5):
        super().__init__()
        self.mel, self.floor = mel, floor

    def forward(self, wav: Tensor) -> Tensor:
        return torch.log(self.mel(wav).clamp(min=self.floor))


def db(x: Tensor, ref: float = 1.0, amin: float = 1e-10) -> Tensor:
    return 10 * torch.log10(torch.maximum(x, torch.tensor(amin))) - 10 * math.log10(ref)


def peak(wav: Tensor) -> Tensor:
    return wav / torch.clamp(wav.abs().amax(-1, keepdim=True), min=1e-4)


def cmvn(x: Tensor, eps: float = 1e-6) -> Tensor:
    m = x.mean(1, keepdim=True)
    v = x.var(1, keepdim=True, unbiased=False)
    return (x - m) / torch.sqrt(v + eps)


class AttentiveStats(nn.Module):
    def __init__(self, c: int, bottleneck: int = 128):
        super().__init__()
        self.att = nn.Sequential(nn.Conv1d(c, bottleneck, 1), nn.Tanh(), nn.Conv1d(bottleneck, c, 1))

    def forward(self, x: Tensor) -> Tensor:
        w = self.att(x).softmax(-1)
        mu = (x * w).sum(-1)
        sg = ((x.pow(2) * w).sum(-1) - mu.pow(2)).clamp(min=1e-4).sqrt()
        return torch.cat([mu, sg], 1)


def snr_mix(clean: Tensor, noise: Tensor, snr_db: float) -> Tensor:
    pc, pn = clean.pow(2).mean(), noise.pow(2).mean()
    gain = torch.sqrt(pc / (pn * 10 ** (snr_db / 10) + 1e-8) + 1e-12)
    return clean + gain * noise


def phase_loss(p: Tensor, q: Tensor) -> Tensor:
    d = p - q
    return torch.atan2(d.sin(), d.cos()).abs().mean()
