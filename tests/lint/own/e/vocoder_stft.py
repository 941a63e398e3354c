import torch
from torch import nn, Tensor
import torch.nn.functional as F


def magnitude(x: Tensor, n_fft: int, hop: int) -> Tensor:
    window = torch.hann_window(n_fft, device=x.device)
    s = torch.stft(x, n_fft, hop, window=window, return_complex=True)
    return torch.sqrt(s.real ** 2 + s.imag ** 2 + 1e-7)


def spectral_convergence(a: Tensor, b: Tensor) -> Tensor:
    return torch.norm(b - a, p="fro") / torch.norm(b, p="fro").clamp(min=1e-8)


def log_mag(a: Tensor, b: Tensor) -> Tensor:
    return F.l1_loss(torch.log(a), torch.log(b))


class MultiResSTFT(nn.Module):
    def __init__(self, sizes=((1024, 256), (2048, 512), (512, 128))):
        super().__init__()
        self.sizes = sizes

    def forward(self, pred, target):
        sc, mag = 0.0, 0.0
        for n_fft, hop in self.sizes:
            a, b = magnitude(pred, n_fft, hop), magnitude(target, n_fft, hop)
            sc = sc + spectral_convergence(a, b)
            mag = mag + log_mag(a, b)
        return (sc + mag) / len(self.sizes)


def gen_step(gen, disc, mel, wav, opt, crit, lam=2.5):
    fake = gen(mel)
    adv = (disc(fake) - 1).pow(2).mean()
    loss = lam * crit(fake.squeeze(1), wav.squeeze(1)) + adv
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(gen.parameters(), 10.0)
    opt.step()
    return loss.item()
