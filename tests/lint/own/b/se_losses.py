import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIN = torch.hann_window(512)


def stft(x: Tensor) -> Tensor:
    return torch.stft(x, 512, 128, window=WIN.to(x.device), return_complex=True)


def magnitude(spec: Tensor) -> Tensor:
    return torch.sqrt(spec.real.square() + spec.imag.square())


def compressed_loss(est: Tensor, ref: Tensor) -> Tensor:
    me, mr = magnitude(stft(est)), magnitude(stft(ref))
    return F.mse_loss(me ** 0.3, mr ** 0.3)


def compressed_loss_safe(est: Tensor, ref: Tensor, c: float = 0.3) -> Tensor:
    me = stft(est).abs().clamp(min=1e-8)
    mr = stft(ref).abs().clamp(min=1e-8)
    return F.mse_loss(me ** c, mr ** c)


def si_sdr(est: Tensor, ref: Tensor) -> Tensor:
    alpha = (est * ref).sum(-1, keepdim=True) / (ref.pow(2).sum(-1, keepdim=True) + 1e-8)
    target = alpha * ref
    noise = est - target
    return 10 * torch.log10(target.pow(2).sum(-1) / noise.pow(2).sum(-1))


class MultiRes(nn.Module):
    def __init__(self, sizes=(256, 512, 1024)):
        super().__init__()
        self.sizes = sizes

    def forward(self, est, ref):
        total = 0.0
        for n in self.sizes:
            w = torch.hann_window(n, device=est.device)
            a = torch.stft(est, n, n // 4, window=w, return_complex=True).abs()
            b = torch.stft(ref, n, n // 4, window=w, return_complex=True).abs()
            total = total + F.l1_loss(torch.log(a + 1e-5), torch.log(b + 1e-5))
        return total / len(self.sizes)
