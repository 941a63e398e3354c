import torch
from torch import nn


class RangeDoppler(nn.Module):
    """Raw FMCW chirps to a compressed range-Doppler map."""

    def __init__(self, n_range: int = 256, n_doppler: int = 128):
        super().__init__()
        self.n_range, self.n_doppler = n_range, n_doppler
        self.window = nn.Parameter(torch.hann_window(n_range))

    def forward(self, chirps):
        rng = torch.fft.rfft(chirps * self.window, n=self.n_range, dim=-1)
        dop = torch.fft.fftshift(torch.fft.fft(rng, n=self.n_doppler, dim=-2), dim=-2)
        power = dop.real ** 2 + dop.imag ** 2
        return power.pow(0.3)


class FallNet(nn.Module):
    def __init__(self, classes: int = 6):
        super().__init__()
        self.front = RangeDoppler()
        self.body = nn.Sequential(
            nn.Conv2d(1, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, 2, 1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        )
        self.fc = nn.Linear(64, classes)

    def forward(self, chirps):
        rd = self.front(chirps).unsqueeze(1)
        peak = rd.amax((-2, -1), keepdim=True)
        x = self.body(rd / (peak + 1e-6)).flatten(1)
        x = x.nan_to_num(0.0)
        return self.fc(x)


def cfar_mask(power, guard=2, train=8, scale=3.0):
    k = 2 * (guard + train) + 1
    noise = nn.functional.avg_pool2d(power, k, 1, k // 2)
    return power > scale * noise
