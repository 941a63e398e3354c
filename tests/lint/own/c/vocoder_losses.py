import torch
import torch.nn.functional as F
from torch import Tensor, nn


def stft_mag(x: Tensor, n_fft: int, hop: int, win: Tensor) -> Tensor:
    s = torch.stft(x, n_fft, hop, window=win, return_complex=True)
    return torch.sqrt(torch.clamp(s.real ** 2 + s.imag ** 2, min=1e-7))


class STFTLoss(nn.Module):
    def __init__(self, n_fft: int):
        super().__init__()
        self.n_fft, self.hop = n_fft, n_fft // 4
        self.register_buffer("win", torch.hann_window(n_fft))

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        a, b = stft_mag(y, self.n_fft, self.hop, self.win), stft_mag(t, self.n_fft, self.hop, self.win)
        sc = torch.norm(b - a, p="fro") / torch.norm(b, p="fro").clamp(min=1e-5)
        return sc + F.l1_loss(a.log(), b.log())


class MultiRes(nn.Module):
    def __init__(self, sizes=(512, 1024, 2048)):
        super().__init__()
        self.parts = nn.ModuleList(STFTLoss(n) for n in sizes)

    def forward(self, y, t):
        return sum(p(y, t) for p in self.parts) / len(self.parts)


def si_sdr(est: Tensor, ref: Tensor, eps: float = 1e-8) -> Tensor:
    ref = ref - ref.mean(-1, keepdim=True)
    est = est - est.mean(-1, keepdim=True)
    a = (est * ref).sum(-1, keepdim=True) / (ref.square().sum(-1, keepdim=True) + eps)
    proj = a * ref
    ratio = (proj.square().sum(-1) + eps) / ((est - proj).square().sum(-1) + eps)
    return 10 * torch.log10(ratio)


def mu_law(x: Tensor, mu: int = 255) -> Tensor:
    y = torch.sign(x) * torch.log1p(mu * x.abs()) / torch.log1p(torch.tensor(float(mu)))
    return ((y + 1) / 2 * mu + 0.5).long().clamp(0, mu)


def rms_match(x: Tensor, ref: Tensor) -> Tensor:
    gain = ref.square().mean(-1, keepdim=True).add(1e-8).sqrt() / x.square().mean(-1, keepdim=True).add(1e-8).sqrt()
    return x * gain
