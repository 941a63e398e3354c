import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class PackedMocap(Dataset):
    """Joint rotations stored as three int16 components of a unit quaternion."""

    def __init__(self, n=45, joints=5, seed=12):
        rng = np.random.default_rng(seed)
        xyz = rng.uniform(-0.5, 0.5, (n, joints, 3))
        xyz[33, 2] = np.array([0.6, 0.8, 0.0])
        self.packed = np.rint(xyz * 32767).astype(np.int16)
        self.action = rng.integers(0, 3, n)

    def __len__(self):
        return len(self.packed)

    def __getitem__(self, i):
        return torch.from_numpy(self.packed[i]), int(self.action[i])


class UnpackQuat(nn.Module):
    def forward(self, packed):
        xyz = packed.float() / 32767.0
        w = torch.sqrt(1.0 - xyz.square().sum(-1, keepdim=True))
        return torch.cat([w, xyz], dim=-1)


class ActionNet(nn.Module):
    def __init__(self, joints=5, hidden=24, classes=3):
        super().__init__()
        self.unpack = UnpackQuat()
        self.encode = nn.Sequential(nn.Flatten(), nn.Linear(joints * 4, hidden), nn.ReLU(), nn.Dropout(0.1))
        self.classify = nn.Linear(hidden, classes)

    def forward(self, packed):
        return self.classify(self.encode(self.unpack(packed)))


def main():
    torch.manual_seed(0)
    model = ActionNet()
    opt = torch.optim.Adagrad(model.parameters(), lr=0.02)
    criterion = nn.CrossEntropyLoss()
    for step, (packed, action) in enumerate(DataLoader(PackedMocap(), batch_size=5)):
        opt.zero_grad()
        loss = criterion(model(packed), action)
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
