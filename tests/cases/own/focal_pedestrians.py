import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Crops(Dataset):
    def __init__(self, n=48, d=12):
        g = torch.Generator().manual_seed(5)
        self.x = torch.randn(n, d, generator=g)
        self.y = (self.x[:, 0] + 0.3 * self.x[:, 1] > 0).float()
        self.x[7] *= 3.0e2   # overexposed background crop
        self.x[19] *= -2.0e2
        self.y[7], self.y[19] = 0.0, 1.0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"image": self.x[i], "target": self.y[i], "index": i}


def make_focal(alpha=0.75, gamma=2.0):
    def focal(p, t):
        p = p.clamp(1e-12, 1.0 - 1e-12)
        positive = alpha * (1.0 - p) ** gamma * t * torch.log(p)
        negative = (
            (1.0 - alpha)
            * p ** gamma
            * (1.0 - t)
            * torch.log(1.0 - p)
        )
        return -(positive + negative)
    return focal


class Detector(nn.Module):
    def __init__(self, d=12, h=24):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(d, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU())
        self.score = nn.Sequential(nn.Linear(h, 1), nn.Flatten(0))

    def forward(self, x):
        return torch.sigmoid(self.score(self.features(x)))


def main():
    torch.manual_seed(0)
    loader = DataLoader(Crops(), batch_size=6, shuffle=True, num_workers=2, generator=torch.Generator().manual_seed(8))
    model, criterion = Detector(), make_focal()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step, batch in enumerate(loader):
        per_crop = criterion(model(batch["image"]), batch["target"])
        loss = per_crop.sum() / batch["target"].sum().clamp(min=1)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
