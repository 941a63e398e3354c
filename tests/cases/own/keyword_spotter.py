import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class SpeechCommands(Dataset):
    def __init__(self, n=48, samples=800, seed=5):
        rng = np.random.default_rng(seed)
        self.labels = rng.integers(0, 4, n)
        t = np.arange(samples) / 8000.0
        tone = np.sin(2 * np.pi * (300.0 + 250.0 * self.labels)[:, None] * t)
        self.wave = (0.5 * tone + rng.normal(0, 0.1, (n, samples))).astype(np.float32)
        self.wave[33] = 0.0

    def log_power(self, wave, frame=80):
        frames = wave.reshape(-1, frame) * np.hanning(frame)
        power = np.abs(np.fft.rfft(frames, axis=1)) ** 2
        with np.errstate(divide="ignore"):
            return (10.0 * np.log10(power[:, :40]) / 20.0).astype(np.float32)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        spec = torch.from_numpy(self.log_power(self.wave[i]))
        return spec, int(self.labels[i])


class KeywordNet(nn.Module):
    def __init__(self, bins=40, c=16, classes=4):
        super().__init__()
        self.features = nn.Sequential(nn.Conv1d(bins, c, 3, padding=1), nn.BatchNorm1d(c), nn.ReLU())
        self.classifier = nn.Linear(c, classes)

    def forward(self, spec):
        return self.classifier(self.features(spec.transpose(1, 2)).mean(2))


def main():
    torch.manual_seed(0)
    loader = DataLoader(SpeechCommands(), batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(9))
    model = KeywordNet()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step, (spec, label) in enumerate(loader):
        opt.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(spec), label, label_smoothing=0.05)
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
