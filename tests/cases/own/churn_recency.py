import random

import torch
import torch.nn as nn
from torch.utils.data import DataLoader


def load_customers(n=42, seed=13):
    rnd = random.Random(seed)
    rows = []
    for i in range(n):
        orders = rnd.randint(1, 12)
        rows.append({
            "tenure": rnd.uniform(0.1, 6.0),
            "orders": orders,
            "days_since_order": rnd.uniform(1.0, 90.0),
            "churned": float(rnd.random() < 1.0 / orders),
        })
    rows[32]["orders"] = 0
    rows[32]["days_since_order"] = float("inf")
    return rows


def collate(rows):
    features = torch.tensor([[r["tenure"] / 6.0, r["orders"] / 12.0, r["days_since_order"] / 90.0] for r in rows])
    target = torch.tensor([r["churned"] for r in rows])
    return features, target


class ChurnModel(nn.Module):
    def __init__(self, d=3, hidden=16):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(d, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.logit = nn.Linear(hidden, 1)
        self.skip = nn.Linear(d, 1, bias=False)

    def forward(self, x):
        return (self.logit(self.trunk(x)) + self.skip(x)).squeeze(1)


def main():
    torch.manual_seed(0)
    loader = DataLoader(load_customers(), batch_size=7, collate_fn=collate)
    model = ChurnModel()
    criterion = nn.BCEWithLogitsLoss()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, (x, y) in enumerate(loader):
        loss = criterion(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
