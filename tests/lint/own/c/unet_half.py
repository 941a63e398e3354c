import torch
from torch import nn
from torch.utils.data import DataLoader

from unet import UNet


def channel_norm(x: torch.Tensor) -> torch.Tensor:
    x = x.to(torch.float16)
    mu = x.mean((2, 3), keepdim=True)
    var = (x - mu).square().mean((2, 3), keepdim=True)
    return (x - mu) / torch.sqrt(var + 1e-8)


def psnr(a, b):
    mse = (a.float() - b.float()).square().mean().clamp(min=1e-10)
    return -10 * mse.log10()


class Denoise:
    def __init__(self, width: int, dev: str = "cuda"):
        self.dev = dev
        self.net = UNet(3, 3, width).to(dev, dtype=torch.float16)
        self.opt = torch.optim.Adam(self.net.parameters(), lr=1e-4)
        self.l1 = nn.L1Loss()

    def run(self, ds, epochs=50):
        for epoch in range(epochs):
            total = 0.0
            dl = DataLoader(ds, 16, shuffle=True, num_workers=4, drop_last=True)
            for noisy, clean in dl:
                noisy = channel_norm(noisy.to(self.dev))
                clean = channel_norm(clean.to(self.dev))
                out = self.net(noisy)
                loss = self.l1(out.float(), clean.float())
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                total += loss.item()
            print(f"{epoch}: {total / len(dl):.5f} psnr {psnr(out, clean).item():.2f}")
