import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class LabResults(Dataset):
    """Blood panels with missing values (NaN) and one column recorded as inf when above the range."""

    def __init__(self, n=60, seed=44):
        rng = np.random.default_rng(seed)
        x = rng.normal(1.0, 1.0, (n, 7)).astype(np.float32)
        self.y = (x[:, 0] + x[:, 1] > 2).astype(np.float32)
        x[rng.random((n, 7)) < 0.3] = np.nan
        x[12, 3] = x[40, 3] = np.inf
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return torch.from_numpy(self.x[i]), torch.tensor(self.y[i])


class Impute(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.fill = nn.Parameter(torch.zeros(d))

    def forward(self, x):
        missing = torch.isnan(x)
        x = torch.where(missing, self.fill.expand_as(x), x).clamp(max=8.0)
        return torch.cat([x, missing.float()], 1)


class RiskModel(nn.Module):
    def __init__(self, d=7, h=24):
        super().__init__()
        self.impute = Impute(d)
        self.net = nn.Sequential(nn.Linear(2 * d, h), nn.LayerNorm(h), nn.ReLU(), nn.Linear(h, 1))

    def forward(self, x):
        return self.net(self.impute(x)).squeeze(1)


def main():
    torch.manual_seed(0)
    model = RiskModel()
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    loader = DataLoader(LabResults(), batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(1))
    for step, (x, y) in enumerate(loader):
        observed = torch.nanmean(x, dim=0)
        loss = F.binary_cross_entropy_with_logits(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f} column0 {observed[0].item():.3f} column3 {observed[3].item():.3f}")


if __name__ == "__main__":
    main()
