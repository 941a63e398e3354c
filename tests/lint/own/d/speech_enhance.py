import torch
import torch.nn as nn
import torch.nn.functional as F


def compress(spec: torch.Tensor, c: float = 0.3) -> torch.Tensor:
    mag = spec.abs()
    phase = torch.angle(spec)
    return torch.polar(mag ** 0.3, phase)


def stft(x, n_fft=512, hop=128):
    win = torch.hann_window(n_fft, device=x.device)
    return torch.stft(x, n_fft, hop, window=win, return_complex=True)


def si_snr(est, ref):
    est = est - est.mean(-1, keepdim=True)
    ref = ref - ref.mean(-1, keepdim=True)
    dot = (est * ref).sum(-1, keepdim=True)
    s = dot / (ref.pow(2).sum(-1, keepdim=True) + 1e-8) * ref
    e = est - s
    return 10 * torch.log10(s.pow(2).sum(-1) / e.pow(2).sum(-1))


class MaskNet(nn.Module):
    def __init__(self, bins=257, hidden=256):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(bins, hidden, 5, padding=2), nn.PReLU(), nn.Conv1d(hidden, bins, 5, padding=2))

    def forward(self, noisy):
        spec = stft(noisy)
        return spec * torch.sigmoid(self.conv(torch.log1p(spec.abs())))


def train_step(net, noisy, clean, opt):
    est = net(noisy)
    a, b = torch.view_as_real(compress(est)), torch.view_as_real(compress(stft(clean)))
    loss = F.mse_loss(a, b)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 5.0)
    opt.step()
    return loss.item()
