import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class ProductTriplets(Dataset):
    """(anchor, positive, negative) feature vectors; positives are another photo of the product."""

    def __init__(self, n=48, d=20):
        g = torch.Generator().manual_seed(8)
        self.centers = torch.randn(n, d, generator=g)
        self.noise = 0.3 * torch.randn(n, d, generator=g)
        self.noise[29] = 0.0  # product with a single photo: the positive is the anchor itself

    def __len__(self):
        return len(self.centers)

    def __getitem__(self, i):
        anchor = self.centers[i]
        return anchor, anchor + self.noise[i], self.centers[(i + 17) % len(self)]


class Embedder(nn.Module):
    def __init__(self, d=20, out=8):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d, 32), nn.ReLU(), nn.Linear(32, out))

    def forward(self, x):
        return self.net(x)


class TripletLoss(nn.Module):
    def __init__(self, margin=2.0):
        super().__init__()
        self.margin = margin

    def distance(self, a, b):
        diff = a - b
        return torch.sqrt(diff.pow(2).sum(dim=1))

    def forward(self, anchor, positive, negative):
        gap = self.distance(anchor, positive) - self.distance(anchor, negative)
        return torch.relu(gap + self.margin).mean()


def main():
    torch.manual_seed(0)
    model, criterion = Embedder(), TripletLoss()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step, (anchor, positive, negative) in enumerate(DataLoader(ProductTriplets(), batch_size=6)):
        loss = criterion(model(anchor), model(positive), model(negative))
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
