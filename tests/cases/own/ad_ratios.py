import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Campaigns(Dataset):
    columns = ("ctr", "cpc", "spend", "frequency")

    def __init__(self, n=54, seed=15):
        rng = np.random.default_rng(seed)
        shown = rng.integers(200, 900, n).astype(np.float64)
        reach = shown / rng.uniform(1.5, 4.0, n)
        clicks = np.floor(shown * rng.uniform(0.02, 0.2, n))
        spend = rng.uniform(5.0, 50.0, n)
        clicks[41] = 0.0            # paid per impression
        shown[8] = clicks[8] = 0.0  # paused campaign, dropped below
        with np.errstate(divide="ignore", invalid="ignore"):
            ctr, cpc = clicks / shown, spend / clicks
        table = np.stack([10 * ctr, cpc, spend / 50.0, shown / reach / 4.0], 1)
        self.keep = np.flatnonzero(shown > 0)
        self.table = table[self.keep].astype(np.float32)
        self.sales = (spend / 25.0 + rng.normal(0, 0.1, n)).astype(np.float32)[self.keep]

    def __len__(self):
        return len(self.table)

    def __getitem__(self, i):
        return torch.from_numpy(self.table[i]), self.sales[i]


class SalesModel(nn.Module):
    def __init__(self, d=4, h=16):
        super().__init__()
        self.norm = nn.BatchNorm1d(d)
        self.net = nn.Sequential(nn.Linear(d, h), nn.Tanh(), nn.Linear(h, 1))

    def forward(self, x):
        return self.net(self.norm(x)).squeeze(1)


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(7)
    loader = DataLoader(Campaigns(), batch_size=6, shuffle=True, generator=g, num_workers=2, drop_last=True)
    model = SalesModel()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step, (x, y) in enumerate(loader):
        loss = nn.functional.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
