import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class ClickSessions(Dataset):
    def __init__(self, n=40, items=50, seed=4):
        rng = np.random.default_rng(seed)
        self.clicks = [rng.integers(1, items, rng.integers(2, 9)) for _ in range(n)]
        self.next_item = rng.integers(1, items, n)
        self.clicks[28] = self.clicks[28][:0]

    def __len__(self):
        return len(self.clicks)

    def __getitem__(self, i):
        return self.clicks[i], self.next_item[i]


def pad(batch):
    width = max(len(c) for c, _ in batch)
    ids = np.zeros((len(batch), width), dtype=np.int64)
    for row, (clicks, _) in enumerate(batch):
        ids[row, :len(clicks)] = clicks
    return torch.from_numpy(ids), torch.tensor([int(y) for _, y in batch])


class AttentionPool(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.score = nn.Sequential(nn.Linear(d, d), nn.Tanh(), nn.Linear(d, 1))

    def forward(self, h, padding):
        weight = F.softmax(self.score(h).squeeze(-1).masked_fill(padding, float("-inf")), dim=1)
        return (weight.unsqueeze(-1) * h).sum(1)


class Recommender(nn.Module):
    def __init__(self, items=50, d=16):
        super().__init__()
        self.item = nn.Embedding(items, d, padding_idx=0)
        self.session = nn.ModuleDict({"pool": AttentionPool(d), "mix": nn.Linear(d, d)})
        self.decoder = nn.Linear(d, items)

    def forward(self, ids):
        s = self.session["pool"](self.item(ids), ids == 0)
        return self.decoder(F.gelu(self.session["mix"](s)))


def main():
    torch.manual_seed(0)
    model = Recommender()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step, (ids, target) in enumerate(DataLoader(ClickSessions(), batch_size=5, collate_fn=pad)):
        loss = F.cross_entropy(model(ids), target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
