import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Clips(Dataset):
    def __init__(self, n=40, t=64):
        g = torch.Generator().manual_seed(12)
        self.y = torch.randint(0, 3, (n,), generator=g)
        time = torch.linspace(0, 6.28, t)
        self.wave = torch.sin(time * (2.0 + 3 * self.y[:, None])) + 0.2 * torch.randn(n, t, generator=g)
        self.wave[23] *= 2048.0  # int16 samples that were never divided by 32768

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.wave[i].unsqueeze(0), self.y[i]


class EnergyPool(nn.Module):
    def forward(self, x):
        return x.pow(2).mean(dim=-1)


class AudioNet(nn.Module):
    def __init__(self, c=12, classes=3):
        super().__init__()
        self.conv = nn.Conv1d(1, c, 9, padding=4)
        self.pool = EnergyPool()
        self.fc = nn.Linear(c, classes)

    def forward(self, x):
        return self.fc(self.pool(self.conv(x)))


def main():
    torch.manual_seed(0)
    model = AudioNet()
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    for step, (wave, y) in enumerate(DataLoader(Clips(), batch_size=5)):
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(wave)
        loss = F.cross_entropy(logits.float(), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
