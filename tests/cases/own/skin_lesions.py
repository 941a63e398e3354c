import torch
import torch.nn as nn
import torch.nn.functional as F

CLASSES = 4


class LesionNet(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        self.block1 = nn.Sequential(nn.Conv2d(3, c, 3, stride=2, padding=1), nn.GroupNorm(2, c), nn.ReLU())
        self.block2 = nn.Sequential(nn.Conv2d(c, c, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.fc = nn.Linear(c, CLASSES)

    def forward(self, x):
        return self.fc(self.block2(self.block1(x)).flatten(1))


def balanced_loss(logits, labels):
    counts = torch.bincount(labels, minlength=CLASSES)
    freq = counts / counts.sum()
    weights = 1.0 / freq
    weights = CLASSES * weights / weights.sum()
    return F.cross_entropy(logits, labels, weight=weights)


def micro_batches(g, step, accumulate):
    for _ in range(accumulate):
        labels = torch.cat([torch.arange(CLASSES), torch.randint(0, CLASSES, (6,), generator=g)])
        labels = labels[torch.randperm(10, generator=g)]
        images = torch.randn(10, 3, 12, 12, generator=g) + 0.2 * labels[:, None, None, None]
        if step == 3:
            keep = labels != 2
            images, labels = images[keep], labels[keep]
        yield images, labels


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(51)
    model = LesionNet()
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    accumulate = 2
    for step in range(6):
        total = 0.0
        opt.zero_grad()
        for images, labels in micro_batches(g, step, accumulate):
            loss = balanced_loss(model(images), labels) / accumulate
            loss.backward()
            total += loss.item()
        opt.step()
        print(f"step {step} loss {total:.4f}")


if __name__ == "__main__":
    main()
