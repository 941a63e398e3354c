import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class TwoSpeakers(Dataset):
    def __init__(self, n=32, samples=240, seed=6):
        rng = np.random.default_rng(seed)
        t = np.arange(samples) / 240.0
        freq = rng.uniform(3.0, 30.0, (n, 2, 1))
        self.sources = np.sin(2 * np.pi * freq * t).astype(np.float32) * rng.uniform(0.3, 1.0, (n, 2, 1)).astype(np.float32)
        self.sources[21, 1] = 0.0

    def __len__(self):
        return len(self.sources)

    def __getitem__(self, i):
        sources = torch.from_numpy(self.sources[i])
        return sources.sum(0), sources


class Separator(nn.Module):
    def __init__(self, c=16, k=12):
        super().__init__()
        self.encoder = nn.Conv1d(1, c, k, stride=k // 2)
        self.mask = nn.Sequential(nn.Conv1d(c, c, 3, padding=1), nn.PReLU(), nn.Conv1d(c, 2 * c, 1), nn.Sigmoid())
        self.decoder = nn.ConvTranspose1d(c, 1, k, stride=k // 2)

    def forward(self, mix):
        h = self.encoder(mix.unsqueeze(1))
        masks = self.mask(h).chunk(2, dim=1)
        return torch.cat([self.decoder(h * m) for m in masks], dim=1)


def si_snr(est, ref, eps=1e-8):
    est = est - est.mean(-1, keepdim=True)
    ref = ref - ref.mean(-1, keepdim=True)
    scale = (est * ref).sum(-1, keepdim=True) / ref.pow(2).sum(-1, keepdim=True)
    target = scale * ref
    ratio = target.pow(2).sum(-1) / ((est - target).pow(2).sum(-1) + eps)
    return 10 * torch.log10(ratio + eps)


def main():
    torch.manual_seed(0)
    model = Separator()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step, (mix, sources) in enumerate(DataLoader(TwoSpeakers(), batch_size=4)):
        loss = -si_snr(model(mix), sources).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
