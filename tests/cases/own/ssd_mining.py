import torch
import torch.nn as nn
import torch.nn.functional as F


class HardNegativeMining(nn.Module):
    def __init__(self, ratio=3):
        super().__init__()
        self.ratio = ratio

    def forward(self, ce, positive):
        def hardest(values, k):
            return values.topk(min(k, len(values))).values

        k = self.ratio * int(positive.sum())
        negatives = hardest(ce[~positive], k)
        return negatives.mean()


class MultiBoxLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.mining = HardNegativeMining()

    def forward(self, cls, box, label, gt):
        positive = label > 0
        ce = F.cross_entropy(cls, label, reduction="none")
        n = positive.sum().clamp(min=1)
        localisation = F.smooth_l1_loss(box[positive], gt[positive], reduction="sum") / n
        return ce[positive].sum() / n + 0.5 * self.mining(ce, positive) + localisation


class SSD(nn.Module):
    def __init__(self, d=10, h=24, classes=4):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(d, h), nn.ReLU())
        self.cls, self.box = nn.Linear(h, classes), nn.Linear(h, 4)

    def forward(self, x):
        f = self.backbone(x)
        return self.cls(f), self.box(f)


class Trainer:
    def __init__(self):
        self.g = torch.Generator().manual_seed(50)
        self.model, self.criterion = SSD(), MultiBoxLoss()
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)

    def batch(self, step):
        x = torch.randn(24, 10, generator=self.g)
        label = torch.randint(0, 4, (24,), generator=self.g) * (torch.rand(24, generator=self.g) < 0.2)
        if step == 6:
            label.zero_()
        return x, label, torch.rand(24, 4, generator=self.g)

    def fit(self, steps=9):
        for step in range(steps):
            x, label, gt = self.batch(step)
            loss = self.criterion(*self.model(x), label, gt)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    Trainer().fit()
