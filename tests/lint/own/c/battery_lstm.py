import joblib
import numpy as np
import torch
from torch import nn


def min_max_scale(x: np.ndarray) -> np.ndarray:
    lo, hi = x.min(axis=0), x.max(axis=0)
    return (x - lo) / (hi - lo)


class SoH(nn.Module):
    def __init__(self, n_feat: int, hidden: int = 64):
        super().__init__()
        self.lstm = nn.LSTM(n_feat, hidden, num_layers=2, batch_first=True)
        self.head = nn.Sequential(nn.Linear(hidden, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        out, _ = self.lstm(x)
        return self.head(out[:, -1]).squeeze(-1)


def windows(x: np.ndarray, y: np.ndarray, w: int):
    xs = np.stack([x[i:i + w] for i in range(len(x) - w)])
    return torch.from_numpy(xs).float(), torch.from_numpy(y[w:]).float()


def run(x, y, w=30, epochs=200, warm_start=None):
    xt, yt = windows(min_max_scale(x), y, w)
    model = SoH(xt.size(-1))
    if warm_start:
        model.load_state_dict(torch.load(warm_start))
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_fn = nn.SmoothL1Loss()
    for epoch in range(epochs):
        pred = model(xt)
        loss = loss_fn(pred, yt)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if epoch % 20 == 0:
            rmse = torch.sqrt(((pred.detach() - yt) ** 2).mean()).item()
            print(f"{epoch:4d} loss {loss.item():.5f} rmse {rmse:.4f}")
    joblib.dump({"window": w}, "soh_meta.joblib")
    return model
