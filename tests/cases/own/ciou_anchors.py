import math

import torch
import torch.nn as nn


class CIoU(nn.Module):
    def forward(self, pred, gt):
        px, py, pw, ph = pred.unbind(1)
        gx, gy, gw, gh = gt.unbind(1)
        iw = (torch.min(px + pw / 2, gx + gw / 2) - torch.max(px - pw / 2, gx - gw / 2)).clamp(min=0)
        ih = (torch.min(py + ph / 2, gy + gh / 2) - torch.max(py - ph / 2, gy - gh / 2)).clamp(min=0)
        inter = iw * ih
        iou = inter / (pw * ph + gw * gh - inter + 1e-7)
        centre = ((px - gx).pow(2) + (py - gy).pow(2)) / 100.0
        v = 4 / math.pi ** 2 * (
            torch.atan(gw / gh)
            - torch.atan(pw / ph)
        ).pow(2)
        with torch.no_grad():
            a = v / (1 - iou + v + 1e-7)
        return (1 - iou + centre + a * v).mean()


class DetectionLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.box, self.obj = CIoU(), nn.BCEWithLogitsLoss()

    def forward(self, out, gt, obj):
        return 0.05 * self.box(out[:, :4], gt) + self.obj(out[:, 4], obj)


class AnchorHead(nn.Module):
    def __init__(self, d=10, h=24):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(d, h), nn.SiLU())
        self.centre, self.size, self.obj = nn.Linear(h, 2), nn.Linear(h, 2), nn.Linear(h, 1)
        nn.init.constant_(self.size.bias, 2.5)

    def forward(self, x):
        f = self.stem(x)
        return torch.cat([self.centre(f), torch.relu(self.size(f)), self.obj(f)], 1)


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(44)
    model, criterion = AnchorHead(), DetectionLoss()
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for step in range(9):
        x = torch.randn(10, 10, generator=g)
        gt = torch.cat([torch.randn(10, 2, generator=g), 0.5 + 2 * torch.rand(10, 2, generator=g)], 1)
        if step == 2:
            gt[3, 3] = 0.0  # line annotation
        if step == 6:
            x[4] *= -20.0
        loss = criterion(model(x), gt, (x[:, 0] > 0).float())
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
