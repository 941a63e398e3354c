import torch
from torch import nn
import torch.nn.functional as F


def si_sdr(est: torch.Tensor, ref: torch.Tensor, eps: float = 1e-8) -> torch.Tensor:
    ref = ref - ref.mean(-1, keepdim=True)
    est = est - est.mean(-1, keepdim=True)
    proj = (est * ref).sum(-1, keepdim=True) * ref / (ref.pow(2).sum(-1, keepdim=True) + eps)
    noise = est - proj
    ratio = proj.pow(2).sum(-1) / noise.pow(2).sum(-1)
    return 10 * torch.log10(ratio)


def compress(mag: torch.Tensor) -> torch.Tensor:
    return mag.pow(0.3)


class MaskNet(nn.Module):
    def __init__(self, bins: int = 257, hidden: int = 400):
        super().__init__()
        self.rnn = nn.GRU(bins, hidden, num_layers=2, batch_first=True)
        self.fc = nn.Linear(hidden, bins)

    def forward(self, mag):
        h, _ = self.rnn(mag.transpose(1, 2))
        return torch.sigmoid(self.fc(h)).transpose(1, 2)


def train(net, loader, opt, n_fft=512, hop=128):
    win = torch.hann_window(n_fft).cuda()
    for noisy, clean in loader:
        noisy, clean = noisy.cuda(), clean.cuda()
        spec = torch.stft(noisy, n_fft, hop, window=win, return_complex=True)
        target = torch.stft(clean, n_fft, hop, window=win, return_complex=True).abs()
        mask = net(spec.abs())
        est = torch.istft(spec * mask, n_fft, hop, window=win, length=noisy.size(-1))
        loss = F.mse_loss(compress(mask * spec.abs()), compress(target)) - 0.01 * si_sdr(est, clean).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
