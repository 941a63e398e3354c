import math
import torch
import torch.nn.functional as F
from torch import nn


class ArcMargin(nn.Module):
    def __init__(self, d: int, n: int, s: float = 64.0, m: float = 0.5):
        super().__init__()
        self.weight = nn.Parameter(torch.FloatTensor(n, d))
        nn.init.xavier_uniform_(self.weight)
        self.s, self.m = s, m
        self.th = math.cos(math.pi - m)

    def forward(self, feats, ids):
        cos = F.linear(F.normalize(feats), F.normalize(self.weight)).float()
        theta = torch.acos(cos.clamp(-1.0 + 1e-6, 1.0 - 1e-6))
        phi = torch.cos(theta + self.m)
        phi = torch.where(cos > self.th, phi, cos - self.m * math.sin(self.m))
        hot = F.one_hot(ids, cos.size(1)).bool()
        return F.cross_entropy(self.s * torch.where(hot, phi, cos), ids)


@torch.no_grad()
def verify(a, b, same, thresholds=torch.linspace(-1, 1, 200)):
    s = (F.normalize(a) * F.normalize(b)).sum(-1)
    acc = ((s[None] > thresholds[:, None]) == same[None]).float().mean(1)
    best = acc.argmax()
    return acc[best].item(), thresholds[best].item()


def train(backbone, margin, loader, epochs=24):
    params = [*backbone.parameters(), *margin.parameters()]
    opt = torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=5e-4)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for img, ids in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                f = backbone(img.cuda())
            loss = margin(f.float(), ids.cuda())
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(params, 5.0)
            scaler.step(opt)
            scaler.update()
