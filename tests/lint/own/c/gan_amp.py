import torch
import torch.nn as nn


class Discriminator(nn.Module):
    def __init__(self, ndf=64, nc=3):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(nc, ndf, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, ndf * 2, 4, 2, 1), nn.BatchNorm2d(ndf * 2), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 2, 1, 8),
        )

    def forward(self, x):
        return self.main(x).view(-1)


bce = nn.BCEWithLogitsLoss()


def train_epoch(G, D, opt_g, opt_d, loader, device, nz=100):
    scaler = torch.amp.GradScaler("cuda")
    for real, _ in loader:
        real = real.to(device)
        b = real.size(0)
        z = torch.randn(b, nz, 1, 1, device=device)

        opt_d.zero_grad()
        with torch.autocast("cuda"):
            fake = G(z)
            loss_d = bce(D(real), torch.ones(b, device=device)) + bce(D(fake.detach()), torch.zeros(b, device=device))
        scaler.scale(loss_d).backward()
        nn.utils.clip_grad_norm_(D.parameters(), 1.0)
        scaler.step(opt_d)

        opt_g.zero_grad()
        with torch.autocast("cuda"):
            loss_g = bce(D(fake), torch.ones(b, device=device))
        scaler.scale(loss_g).backward()
        scaler.unscale_(opt_g)
        nn.utils.clip_grad_norm_(G.parameters(), 1.0)
        scaler.step(opt_g)
        scaler.update()
    return loss_d.item(), loss_g.item()
