import torch
import torch.nn as nn
import torch.optim as optim

nz, ngf, ndf = 100, 64, 64

netD = nn.Sequential(
    nn.Conv2d(3, ndf, 4, 2, 1, bias=False),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False),
    nn.BatchNorm2d(ndf * 2),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(ndf * 2, 1, 16, 1, 0, bias=False),
    nn.Sigmoid(),
)

criterion = nn.BCELoss()
optimizerD = optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))


def train(netG, loader, device, epochs=25):
    optimizerG = optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
    for epoch in range(epochs):
        for i, (real, _) in enumerate(loader):
            real = real.to(device)
            b = real.size(0)
            noise = torch.randn(b, nz, 1, 1, device=device)
            fake = netG(noise)
            netD.zero_grad()
            errD = criterion(netD(real).view(-1), torch.ones(b, device=device))
            errD = errD + criterion(netD(fake.detach()).view(-1), torch.zeros(b, device=device))
            errD.backward()
            optimizerD.step()
            netG.zero_grad()
            errG = criterion(netD(fake).view(-1), torch.ones(b, device=device))
            errG.backward()
            optimizerG.step()
            if i % 50 == 0:
                print(f"[{epoch}/{epochs}][{i}] D {errD.item():.4f} G {errG.item():.4f}")
