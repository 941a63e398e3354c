import torch
import torch.nn as nn
from torch.distributions import Normal, kl_divergence
from torch.utils.data import DataLoader, TensorDataset


class Encoder(nn.Module):
    def __init__(self, d, z):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(d, 32), nn.LeakyReLU())
        self.mu = nn.Linear(32, z)
        self.logvar = nn.Linear(32, z)

    def forward(self, x):
        h = self.body(x)
        scale = self.logvar(h).exp().sqrt()
        return Normal(self.mu(h), scale, validate_args=False)


class SpectraVAE(nn.Module):
    def __init__(self, d=24, z=4):
        super().__init__()
        self.encoder = Encoder(d, z)
        self.decoder = nn.Sequential(nn.Linear(z, 32), nn.LeakyReLU(), nn.Linear(32, d))

    def forward(self, x):
        posterior = self.encoder(x)
        return self.decoder(posterior.rsample()), posterior


def elbo(recon, x, posterior, beta=0.1):
    prior = Normal(torch.zeros_like(posterior.loc), torch.ones_like(posterior.scale))
    kl = kl_divergence(posterior, prior).sum(1)
    rec = nn.functional.smooth_l1_loss(recon, x, reduction="none").sum(1)
    return (rec + beta * kl).mean()


def load_spectra(n=56, d=24):
    g = torch.Generator().manual_seed(2)
    x = torch.rand(n, d, generator=g) + torch.linspace(0, 1, d)
    x[37, 5:9] = 9.0e2  # cosmic-ray hit on the detector
    return TensorDataset(x)


def main():
    torch.manual_seed(3)
    model = SpectraVAE()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step, (x,) in enumerate(DataLoader(load_spectra(), batch_size=8)):
        recon, posterior = model(x)
        loss = elbo(recon, x, posterior)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
