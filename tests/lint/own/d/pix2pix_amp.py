import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast


class Pix2Pix:
    def __init__(self, G, D, lr=2e-4, lam=100.0):
        self.G, self.D, self.lam = G, D, lam
        self.opt_g = torch.optim.Adam(G.parameters(), lr, betas=(0.5, 0.999))
        self.opt_d = torch.optim.Adam(D.parameters(), lr, betas=(0.5, 0.999))
        self.scaler = GradScaler()
        self.gan, self.l1 = nn.BCEWithLogitsLoss(), nn.L1Loss()

    def d_step(self, x, y):
        with autocast():
            real, fake = self.D(x, y), self.D(x, self.G(x).detach())
            loss = 0.5 * (self.gan(real, torch.ones_like(real)) + self.gan(fake, torch.zeros_like(fake)))
        self.opt_d.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt_d)
        nn.utils.clip_grad_norm_(self.D.parameters(), 1.0)
        self.scaler.step(self.opt_d)
        return loss.item()

    def g_step(self, x, y):
        with autocast():
            y_hat = self.G(x)
            out = self.D(x, y_hat)
            loss = self.gan(out, torch.ones_like(out)) + self.lam * self.l1(y_hat, y)
        self.opt_g.zero_grad()
        self.scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(self.G.parameters(), 1.0)
        self.scaler.step(self.opt_g)
        self.scaler.update()
        return loss.item()

    def resume(self, path):
        ck = torch.load(f"{path}/latest.pth", map_location="cuda")
        self.G.load_state_dict(ck["G"])
        self.D.load_state_dict(ck["D"])
