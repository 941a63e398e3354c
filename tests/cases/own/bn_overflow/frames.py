import torch
from torch.utils.data import Dataset


class Frames(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(9)
        self.x = torch.randn(240, 10, generator=generator)
        self.x[131, 6] = 4e21
        self.y = self.x[:, :3].sum(1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]
