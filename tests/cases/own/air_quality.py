import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Stations(Dataset):
    def __init__(self, n=50, seed=20):
        rng = np.random.default_rng(seed)
        self.x = rng.normal(size=(n, 6)).astype(np.float32)
        self.pm = np.exp(0.5 * self.x[:, :3] + 1.0).astype(np.float32)
        self.pm[rng.random((n, 3)) < 0.25] = np.nan
        self.pm[5:10, 2] = np.nan

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return torch.from_numpy(self.x[i]), torch.from_numpy(self.pm[i])


class AirModel(nn.Module):
    def __init__(self, d=6, hidden=24, out=3):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d, hidden), nn.ReLU(), nn.Linear(hidden, out))

    def forward(self, x):
        return self.net(x)


def masked_log_mse(pred, target):
    known = ~torch.isnan(target)
    safe = torch.where(known, target, torch.ones_like(target))
    err = torch.where(known, pred - torch.log(safe), torch.zeros_like(pred))
    return err.pow(2).sum() / known.sum().clamp(min=1)


@torch.no_grad()
def per_pollutant_rmse(pred, target):
    known = ~torch.isnan(target)
    return torch.stack([(pred[known[:, j], j].exp() - target[known[:, j], j]).pow(2).mean().sqrt() for j in range(3)])


def main():
    torch.manual_seed(0)
    model = AirModel()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step, (x, pm) in enumerate(DataLoader(Stations(), batch_size=5)):
        pred = model(x)
        loss = masked_log_mse(pred, pm)
        opt.zero_grad()
        loss.backward()
        opt.step()
        rmse = per_pollutant_rmse(pred, pm)
        print(f"step {step} loss {loss.item():.4f} rmse {[round(v, 3) for v in rmse.tolist()]} mean {rmse.nanmean().item():.3f}")


if __name__ == "__main__":
    main()
