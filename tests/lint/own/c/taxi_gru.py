import argparse

import torch
from accelerate import Accelerator
from torch import nn


class DemandGRU(nn.Module):
    def __init__(self, zones: int, hidden: int = 128):
        super().__init__()
        self.rnn = nn.GRU(zones, hidden, num_layers=2, batch_first=True)
        self.out = nn.Linear(hidden, zones)

    def forward(self, x):
        h, _ = self.rnn(x)
        return self.out(h[:, -1])


def smape(pred, y):
    return (2 * (pred - y).abs() / (pred.abs() + y.abs() + 1.0)).mean()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", required=True)
    ap.add_argument("--clip", type=float, default=1.0)
    ap.add_argument("--detect-anomaly", action="store_true")
    args = ap.parse_args()
    torch.autograd.set_detect_anomaly(args.detect_anomaly)

    acc = Accelerator()
    x, y = torch.load(args.data, map_location="cpu", weights_only=True)
    ds = torch.utils.data.TensorDataset(x, torch.log1p(y))
    loader = torch.utils.data.DataLoader(ds, batch_size=64, shuffle=True)
    model = DemandGRU(x.size(-1))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, opt, loader = acc.prepare(model, opt, loader)
    for epoch in range(50):
        for xb, yb in loader:
            pred = model(xb)
            loss = nn.functional.poisson_nll_loss(pred.clamp(max=15.0), yb)
            opt.zero_grad()
            acc.backward(loss)
            acc.clip_grad_norm_(model.parameters(), args.clip)
            opt.step()
        acc.print(f"{epoch} loss {loss.item():.4f} smape {smape(pred.detach(), yb).item():.3f}")


if __name__ == "__main__":
    main()
