import h5py
import torch
from torch import nn
from torch.utils.data import Dataset


class Bags(Dataset):
    def __init__(self, index, max_tiles=4096):
        self.index, self.max_tiles = index, max_tiles

    def __len__(self):
        return len(self.index)

    def __getitem__(self, i):
        path, label = self.index[i]
        with h5py.File(path) as f:
            x = torch.from_numpy(f["features"][: self.max_tiles])
        keep = torch.zeros(self.max_tiles, dtype=torch.bool)
        keep[: len(x)] = True
        return nn.functional.pad(x, (0, 0, 0, self.max_tiles - len(x))), keep, float(label)


class GatedMIL(nn.Module):
    def __init__(self, d=1024, h=256):
        super().__init__()
        self.v, self.u, self.w = nn.Linear(d, h), nn.Linear(d, h), nn.Linear(h, 1)
        self.cls = nn.Linear(d, 1)

    def forward(self, x, keep):
        a = self.w(torch.tanh(self.v(x)) * torch.sigmoid(self.u(x))).squeeze(-1)
        a = a.masked_fill(~keep, float("-inf"))
        if torch.isinf(a).all():
            a = torch.zeros_like(a)
        w = torch.softmax(a, dim=1)
        slide = torch.einsum("bn,bnd->bd", w, x)
        return torch.sigmoid(self.cls(slide)).squeeze(-1)


def train(model, loader, epochs=20):
    opt = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=1e-5)
    crit = nn.BCELoss()
    for epoch in range(epochs):
        total = 0.0
        for x, keep, y in loader:
            prob = model(x.cuda(), keep.cuda())
            loss = crit(prob, y.cuda().float())
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item()
        print(f"epoch {epoch} loss {total / len(loader):.4f}")
