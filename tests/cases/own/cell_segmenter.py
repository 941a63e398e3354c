import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class CellMasks(Dataset):
    def __init__(self, n=36, size=12, seed=8):
        rng = np.random.default_rng(seed)
        self.images = rng.normal(0.0, 0.3, (n, 1, size, size)).astype(np.float32)
        self.masks = np.zeros((n, 1, size, size), dtype=np.uint8)
        for i in range(n):
            r, c = rng.integers(0, size - 6, 2)
            self.masks[i, 0, r:r + 6, c:c + 6] = 1
        self.images += self.masks
        self.masks[22] *= 255

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return torch.from_numpy(self.images[i]), torch.from_numpy(self.masks[i]).float()


class ExpLogDice(nn.Module):
    def __init__(self, gamma=0.3, smooth=1.0):
        super().__init__()
        self.gamma, self.smooth = gamma, smooth

    def forward(self, logits, mask):
        prob = torch.sigmoid(logits).flatten(1)
        mask = mask.flatten(1)
        inter = (prob * mask).sum(1)
        dice = (2 * inter + self.smooth) / (prob.sum(1) + mask.sum(1) + self.smooth)
        nll = -torch.log(dice)
        return torch.pow(nll, self.gamma).mean()


def main():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1))
    criterion = ExpLogDice()
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    for step, (image, mask) in enumerate(DataLoader(CellMasks(), batch_size=4)):
        loss = criterion(net(image), mask)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
