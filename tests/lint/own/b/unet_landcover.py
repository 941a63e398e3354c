import rasterio
import torch
import torch.nn.functional as F
from torch import nn
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import Dataset

N_CLASSES = 9
MEAN = torch.tensor([0.12, 0.11, 0.09, 0.31]).view(4, 1, 1)
STD = torch.tensor([0.04, 0.05, 0.06, 0.11]).view(4, 1, 1)


class Tiles(Dataset):
    def __init__(self, pairs):
        self.pairs = pairs

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, i):
        img, lab = self.pairs[i]
        x = torch.from_numpy(rasterio.open(img).read()).float() / 10_000
        y = torch.from_numpy(rasterio.open(lab).read(1)).long()
        y = torch.clamp(y, 0, N_CLASSES - 1)
        return (x - MEAN) / STD, y


def soft_dice(logits, y, smooth=1.0):
    p = logits.softmax(1)
    t = F.one_hot(y, N_CLASSES).permute(0, 3, 1, 2).float()
    inter = (p * t).sum((2, 3))
    return 1 - ((2 * inter + smooth) / (p.sum((2, 3)) + t.sum((2, 3)) + smooth)).mean()


def train(net: nn.Module, loader, epochs=60):
    opt = torch.optim.AdamW(net.parameters(), lr=3e-4)
    scaler = GradScaler()
    for epoch in range(epochs):
        for x, y in loader:
            x, y = x.cuda(), y.cuda()
            with autocast():
                logits = net(x)
                loss = F.cross_entropy(logits, y) + soft_dice(logits.float(), y)
            opt.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            nn.utils.clip_grad_value_(net.parameters(), 0.5)
            scaler.step(opt)
            scaler.update()
        print(epoch, loss.item(), scaler.get_scale())
