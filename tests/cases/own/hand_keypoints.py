import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class HandPoses(Dataset):
    def __init__(self, n=28, joints=6, seed=17):
        rng = np.random.default_rng(seed)
        self.crops = rng.random((n, 1, 14, 14)).astype(np.float32)
        self.uv = rng.random((n, joints, 2)).astype(np.float32)
        self.visible = rng.random((n, joints)) < 0.7
        self.visible[:, 0] = True
        self.visible[16:20] = False

    def __len__(self):
        return len(self.crops)

    def __getitem__(self, i):
        return {"crop": self.crops[i], "uv": self.uv[i], "visible": self.visible[i]}


class KeypointNet(nn.Module):
    def __init__(self, joints=6, c=8):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, c, 3, stride=2), nn.ReLU(), nn.Conv2d(c, c, 3, stride=2), nn.ReLU())
        self.regress = nn.Linear(c * 4, joints * 2)

    def forward(self, crop):
        return self.regress(self.backbone(crop).flatten(1)).sigmoid().unflatten(1, (-1, 2))


class VisibleL1(nn.Module):
    def forward(self, pred, uv, visible):
        err = (pred - uv).abs().sum(-1)
        return torch.masked_select(err, visible).mean()


def main():
    torch.manual_seed(0)
    model, criterion = KeypointNet(), VisibleL1()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = DataLoader(HandPoses(), batch_size=4)
    step = 0
    for epoch in range(2):
        for batch in loader:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                pred = model(batch["crop"])
            loss = criterion(pred.float(), batch["uv"], batch["visible"])
            opt.zero_grad()
            loss.backward()
            opt.step()
            print(f"step {step} loss {loss.item():.4f}")
            step += 1


if __name__ == "__main__":
    main()
