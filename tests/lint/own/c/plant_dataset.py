import csv
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, WeightedRandomSampler


class PlantFolder(Dataset):
    def __init__(self, root: str, split: str, num_classes: int, transform=None):
        self.root, self.transform = Path(root), transform
        self.num_classes = num_classes
        with open(self.root / f"{split}.csv", newline="") as fh:
            rows = list(csv.DictReader(fh))
        self.paths = [r["file"] for r in rows]
        labels = np.array([int(r["species"]) for r in rows])
        self.labels = np.clip(labels, 0, num_classes - 1)
        self.temp = np.clip(np.array([float(r["temp_c"]) for r in rows], dtype=np.float32), -40, 60)

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        img = Image.open(self.root / self.paths[i]).convert("RGB")
        if self.transform is not None:
            img = self.transform(img)
        return img, torch.tensor(self.temp[i]), int(self.labels[i])


def balanced_sampler(ds: PlantFolder) -> WeightedRandomSampler:
    counts = np.bincount(ds.labels, minlength=ds.num_classes)
    w = 1.0 / np.maximum(counts, 1) ** 0.5
    return WeightedRandomSampler(w[ds.labels].tolist(), num_samples=len(ds))


def pixel_stats(ds: PlantFolder, n: int = 2000):
    x = torch.stack([ds[i][0] for i in range(min(n, len(ds)))])
    return x.mean((0, 2, 3)), x.std((0, 2, 3))
