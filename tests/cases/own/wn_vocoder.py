import torch
import torch.nn as nn
import torch.nn.functional as F


class WNConv1d(nn.Conv1d):
    def __init__(self, *args, **kw):
        super().__init__(*args, **kw)
        self.g = nn.Parameter(self.weight.detach().flatten(1).norm(dim=1).view(-1, 1, 1))

    def forward(self, x):
        norm = self.weight.flatten(1).norm(dim=1).view(-1, 1, 1)
        w = self.weight * (self.g / norm)
        return self._conv_forward(x, w, self.bias)


class ResidualBlock(nn.Module):
    def __init__(self, c, dilation):
        super().__init__()
        self.conv = WNConv1d(c, 2 * c, 3, padding=dilation, dilation=dilation)
        self.skip = WNConv1d(c, c, 1)
        nn.init.zeros_(self.skip.weight)  # start as the identity
        nn.init.zeros_(self.skip.bias)

    def forward(self, x):
        a, b = self.conv(x).chunk(2, dim=1)
        return x + self.skip(torch.tanh(a) * torch.sigmoid(b))


class Vocoder(nn.Module):
    def __init__(self, mels=10, c=12):
        super().__init__()
        self.inp = WNConv1d(mels, c, 1)
        self.stack = nn.ModuleList([ResidualBlock(c, 1), ResidualBlock(c, 2)])
        self.out = nn.Conv1d(c, 1, 1)

    def forward(self, mel):
        x = self.inp(mel)
        for block in self.stack:
            x = block(x)
        return self.out(F.leaky_relu(x, 0.1)).squeeze(1)


def spectral_loss(pred, target):
    p, t = torch.fft.rfft(pred).abs(), torch.fft.rfft(target).abs()
    return F.l1_loss(torch.log(p + 1e-5), torch.log(t + 1e-5))


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(4)
    model = Vocoder()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.8, 0.99))
    for step in range(5):
        mel = torch.randn(4, 10, 16, generator=g)
        audio = torch.sin(mel[:, 0]) + 0.2 * mel[:, 1]
        pred = model(mel)
        loss = F.l1_loss(pred, audio) + 0.1 * spectral_loss(pred, audio)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
