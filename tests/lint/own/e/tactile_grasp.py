import numpy as np
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class GraspSet(Dataset):
    def __init__(self, path: str):
        with np.load(path) as z:
            frames, label = z["frames"].astype(np.float32), z["label"]
        dead = ~np.isfinite(frames)
        self.frames = torch.from_numpy(np.where(dead, 0.0, frames).astype(np.float32))
        self.label = torch.from_numpy(label).float()
        if not torch.isin(self.label, torch.tensor([0.0, 1.0])).all():
            raise ValueError("labels must be 0 or 1")

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return self.frames[i], self.label[i]


class GraspNet(nn.Module):
    def __init__(self, taxels: int = 96):
        super().__init__()
        self.conv = nn.Conv1d(taxels, 64, 5, padding=2)
        self.fc = nn.Linear(64, 1)

    def forward(self, x):
        return self.fc(F.relu(self.conv(x)).mean(-1)).squeeze(-1)

    @torch.no_grad()
    def success(self, x):
        return torch.sigmoid(self(x))


def train(path, epochs=40):
    ds = GraspSet(path)
    pos = ds.label.sum()
    crit = nn.BCEWithLogitsLoss(pos_weight=(len(ds) - pos) / pos.clamp(min=1))
    net = GraspNet(ds.frames.size(1))
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for x, y in DataLoader(ds, 64, shuffle=True):
            loss = crit(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(f"epoch {epoch}: {loss.item():.4f}")
    torch.save(net.state_dict(), "grasp.pt")
