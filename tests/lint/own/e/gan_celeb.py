import torch
from torch import nn


class Discriminator(nn.Module):
    def __init__(self, ch=64):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(3, ch, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ch, ch * 2, 4, 2, 1), nn.BatchNorm2d(ch * 2), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ch * 2, 1, 16, 1, 0),
            nn.Sigmoid(),
        )

    def forward(self, x):
        return self.main(x).view(-1)


def train(netG, netD, loader, nz=100, epochs=25, device="cuda"):
    criterion = nn.BCELoss()
    optD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
    for epoch in range(epochs):
        for real, _ in loader:
            real = real.to(device)
            ones = torch.ones(real.size(0), device=device)
            zeros = torch.zeros_like(ones)
            fake = netG(torch.randn(real.size(0), nz, 1, 1, device=device))
            optD.zero_grad()
            lossD = criterion(netD(real), ones) + criterion(netD(fake.detach()), zeros)
            lossD.backward()
            optD.step()
            optG.zero_grad()
            lossG = criterion(netD(fake), ones)
            lossG.backward()
            optG.step()
        print(f"[{epoch}] D {lossD.item():.3f} G {lossG.item():.3f}")


def resume(netG, netD, path):
    ck = torch.load(path, map_location="cpu", weights_only=False)
    netG.load_state_dict(ck["G"])
    netD.load_state_dict(ck["D"])
