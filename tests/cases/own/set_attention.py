import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Baskets(Dataset):
    def __init__(self, n=48, size=6, d=8):
        g = torch.Generator().manual_seed(61)
        self.items = torch.randn(n, size, d, generator=g)
        self.count = torch.randint(1, size + 1, (n,), generator=g)
        self.y = (self.items[:, 0, :3]).argmax(1)
        self.count[27] = 0  # everything was returned

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        pad = torch.arange(self.items.shape[1]) >= self.count[i]
        return {"items": self.items[i].masked_fill(pad[:, None], 0.0), "pad": pad, "y": self.y[i]}


class SetAttention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.key, self.value = nn.Linear(d, d), nn.Linear(d, d)
        self.query = nn.Parameter(0.1 * torch.randn(d))

    def forward(self, x, pad):
        score = (self.key(x) @ self.query).masked_fill(pad, float("-inf"))
        weight = F.softmax(score, dim=1)
        weight = torch.nan_to_num(weight, nan=0.0)
        return (weight.unsqueeze(-1) * self.value(x)).sum(1)


class BasketModel(nn.Module):
    def __init__(self, d=8, classes=3):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(d, d), nn.ReLU())
        self.pools = nn.ModuleList([SetAttention(d), SetAttention(d)])
        self.head = nn.Linear(2 * d, classes)

    def forward(self, items, pad):
        h = self.embed(items)
        return self.head(torch.cat([pool(h, pad) for pool in self.pools], 1))


def main():
    torch.manual_seed(0)
    model = BasketModel()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step, b in enumerate(DataLoader(Baskets(), batch_size=6)):
        loss = F.cross_entropy(model(b["items"], b["pad"]), b["y"])
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
