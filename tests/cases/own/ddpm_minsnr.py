import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class GaussianDiffusion:
    def __init__(self, timesteps=50, gamma=None):
        betas = torch.linspace(0.0, 0.04, timesteps)
        self.alpha_bar = torch.cumprod(1.0 - betas, dim=0)
        prev = torch.cat([torch.ones(1), self.alpha_bar[:-1]])
        variance = betas * (1.0 - prev) / (1.0 - self.alpha_bar + 1e-12)
        self.posterior_log_variance = torch.log(variance)  # only used by the sampler
        self.timesteps, self.gamma = timesteps, gamma

    def q_sample(self, x0, t, noise):
        ab = self.alpha_bar[t].unsqueeze(1)
        return ab.sqrt() * x0 + (1.0 - ab).sqrt() * noise

    def loss_weight(self, t):
        ab = self.alpha_bar[t]
        snr = (
            ab
            / (1.0 - ab)
        )
        if self.gamma is not None:
            return torch.minimum(snr, torch.full_like(snr, self.gamma))
        return (snr + 1.0).sqrt()

    def p_losses(self, model, x0, t, noise):
        pred = model(self.q_sample(x0, t, noise), t)
        mse = (pred - noise).pow(2).mean(dim=1)
        return (self.loss_weight(t) * mse).mean()


class Denoiser(nn.Module):
    def __init__(self, d=8, h=32, timesteps=50):
        super().__init__()
        self.time = nn.Embedding(timesteps, h)
        self.inp, self.mid, self.out = nn.Linear(d, h), nn.Linear(h, h), nn.Linear(h, d)

    def forward(self, x, t):
        h = torch.tanh(self.inp(x) + self.time(t))
        return self.out(torch.tanh(self.mid(h)))


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(13)
    data = TensorDataset(torch.randn(64, 8, generator=g))
    loader = DataLoader(data, batch_size=8, shuffle=True, generator=g)
    model, diffusion = Denoiser(), GaussianDiffusion()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, (x0,) in enumerate(loader):
        t = torch.randint(0, diffusion.timesteps, (len(x0),), generator=g)
        loss = diffusion.p_losses(model, x0, t, torch.randn(x0.shape, generator=g))
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
