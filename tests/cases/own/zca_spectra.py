import torch
import torch.nn as nn
import torch.nn.functional as F


class ZCAWhiten(nn.Module):
    def __init__(self, eps=1e-3):
        super().__init__()
        self.eps = eps

    def inverse_sqrt(self, cov):
        eigenvalue, basis = torch.linalg.eigh(cov)
        scale = eigenvalue.clamp(min=self.eps).rsqrt()
        return basis @ torch.diag(scale) @ basis.t()

    def forward(self, h):
        h = h - h.mean(0, keepdim=True)
        cov = h.t() @ h / (h.shape[0] - 1) + self.eps * torch.eye(h.shape[1])
        return h @ self.inverse_sqrt(cov)


class BandEncoder(nn.Module):
    """One gain per band, then decorrelation."""

    def __init__(self, bands=6):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(bands))
        self.whiten = ZCAWhiten()

    def forward(self, x):
        return self.whiten(x * self.gain)


class SpectraNet(nn.Module):
    def __init__(self, bands=6, h=24, classes=3):
        super().__init__()
        self.encoder = BandEncoder(bands)
        self.head = nn.Sequential(nn.Linear(bands, h), nn.ReLU(), nn.Linear(h, classes))

    def forward(self, x):
        return self.head(self.encoder(x))


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(18)
    model = SpectraNet()
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(6):
        x = torch.randn(20, 6, generator=g) + 0.5 * torch.randn(20, 1, generator=g)
        y = x[:, :3].argmax(1)
        if step == 3:
            x[:, 5] = 0.0  # one band off
        if step == 5:
            x = x[:1].expand(20, 6)  # shutter closed: every frame is the same
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
