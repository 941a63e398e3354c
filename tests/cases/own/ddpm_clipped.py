import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class Schedule(nn.Module):
    def __init__(self, timesteps=40):
        super().__init__()
        betas = torch.linspace(0.0, 0.05, timesteps)
        ab = torch.cumprod(1.0 - betas, 0)
        prev = torch.cat([torch.ones(1), ab[:-1]])
        self.register_buffer("ab", ab)
        self.register_buffer("snr", ab / (1.0 - ab))                                  # inf at t = 0
        self.register_buffer("log_var", torch.log(betas * (1.0 - prev) / (1.0 - ab)))  # nan, -inf: sampler starts at t = 2
        self.timesteps = timesteps

    def weight(self, t, gamma=5.0):
        return self.snr[t].clamp(max=gamma)

    def mix(self, x, noise, t):
        ab = self.ab[t].unsqueeze(1)
        return ab.sqrt() * x + (1.0 - ab).sqrt() * noise


class Denoiser(nn.Module):
    def __init__(self, d=8, h=32):
        super().__init__()
        self.schedule = Schedule()
        self.time = nn.Embedding(self.schedule.timesteps, h)
        self.inp, self.out = nn.Linear(d, h), nn.Linear(h, d)

    def forward(self, x, t):
        return self.out(torch.tanh(self.inp(x) + self.time(t)))


@torch.no_grad()
def sample(model, d=8):
    x = torch.ones(1, d)
    for t in reversed(range(2, model.schedule.timesteps)):
        noise = torch.exp(0.5 * model.schedule.log_var[t])
        x = x - 0.02 * model(x, torch.tensor([t])) + 0.0 * noise
    return x.abs().mean().item()


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(13)
    loader = DataLoader(TensorDataset(torch.randn(80, 8, generator=g)), batch_size=10, shuffle=True, generator=g)
    model = Denoiser()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step, (x,) in enumerate(loader):
        t = torch.randint(0, model.schedule.timesteps, (len(x),), generator=g)
        t[0] = 0
        noise = torch.randn(x.shape, generator=g)
        pred = model(model.schedule.mix(x, noise, t), t)
        loss = (model.schedule.weight(t) * (pred - noise).pow(2).mean(1)).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f} sample {sample(model):.3f}")


if __name__ == "__main__":
    main()
