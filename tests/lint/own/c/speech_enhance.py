import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast


class ComplexUNet(nn.Module):
    def __init__(self, ch=45):
        super().__init__()
        self.enc = nn.ModuleList([nn.Conv2d(2, ch, (7, 5), stride=2, padding=(3, 2)), nn.Conv2d(ch, 2 * ch, (7, 5), stride=2, padding=(3, 2))])
        self.dec = nn.ModuleList([nn.ConvTranspose2d(2 * ch, ch, 4, stride=2, padding=1), nn.ConvTranspose2d(ch, 2, 4, stride=2, padding=1)])

    def forward(self, spec):
        x = spec
        for layer in self.enc:
            x = torch.relu(layer(x))
        x = torch.relu(self.dec[0](x))
        mask = torch.tanh(self.dec[1](x))
        return spec * mask


def magnitude(spec):
    # spec: (B, 2, F, T), real and imaginary
    return torch.sqrt(spec[:, 0] ** 2 + spec[:, 1] ** 2)


def mag_loss(est, ref):
    return nn.functional.l1_loss(magnitude(est), magnitude(ref))


def train(model, loader, epochs=100, lr=2e-4):
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    scaler = GradScaler()
    for epoch in range(epochs):
        for noisy, clean in loader:
            noisy, clean = noisy.cuda(), clean.cuda()
            opt.zero_grad()
            with autocast():
                est = model(noisy)
            loss = mag_loss(est.float(), clean) + 0.1 * nn.functional.mse_loss(est.float(), clean)
            scaler.scale(loss).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.5)
            scaler.step(opt)
            scaler.update()
        print(f"epoch {epoch}: {loss.item():.5f}")
