import argparse
import torch
import torch.nn as nn
import torch.optim as optim

ap = argparse.ArgumentParser()
ap.add_argument("--netG", default="")
ap.add_argument("--nz", type=int, default=100)
ap.add_argument("--niter", type=int, default=25)
opt = ap.parse_args()


def weights_init(m):
    if isinstance(m, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(m.weight, 0.0, 0.02)


class Discriminator(nn.Module):
    def __init__(self, nc=3, ndf=64):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(nc, ndf, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, ndf * 2, 4, 2, 1), nn.BatchNorm2d(ndf * 2), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 2, 1, 16, 1, 0), nn.Flatten(0),
        )

    def forward(self, x):
        return self.main(x).sigmoid()


def train(netG, netD, loader, device):
    netD.apply(weights_init)
    if opt.netG:
        netG.load_state_dict(torch.load(opt.netG, map_location=device))
    criterion = nn.BCELoss()
    optD = optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optG = optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
    for epoch in range(opt.niter):
        for real, _ in loader:
            real = real.to(device)
            ones, zeros = torch.ones(len(real), device=device), torch.zeros(len(real), device=device)
            fake = netG(torch.randn(len(real), opt.nz, 1, 1, device=device))
            netD.zero_grad()
            errD = criterion(netD(real), ones) + criterion(netD(fake.detach()), zeros)
            errD.backward()
            optD.step()
            netG.zero_grad()
            errG = torch.log(1.0 - netD(fake)).mean()
            errG.backward()
            optG.step()
        print(epoch, errD.item(), errG.item())
