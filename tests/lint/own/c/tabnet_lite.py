import torch
from torch import nn
import torch.nn.functional as F


class GLU(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.fc, self.bn = nn.Linear(d_in, 2 * d_out), nn.BatchNorm1d(2 * d_out)

    def forward(self, x):
        return F.glu(self.bn(self.fc(x)), dim=-1)


class AttentiveStep(nn.Module):
    def __init__(self, d, n_feat):
        super().__init__()
        self.fc, self.bn = nn.Linear(d, n_feat), nn.BatchNorm1d(n_feat)

    def forward(self, a, prior):
        return F.softmax(self.bn(self.fc(a)) * prior, dim=-1)


class TabNetLite(nn.Module):
    def __init__(self, n_feat, n_cls, d=32, steps=4, gamma=1.3):
        super().__init__()
        self.bn = nn.BatchNorm1d(n_feat)
        self.first = GLU(n_feat, d)
        self.trans = nn.ModuleList(GLU(n_feat, d) for _ in range(steps))
        self.att = nn.ModuleList(AttentiveStep(d, n_feat) for _ in range(steps))
        self.head, self.gamma = nn.Linear(d, n_cls), gamma

    def forward(self, x):
        x = self.bn(x)
        a, prior, out, ent = self.first(x), torch.ones_like(x), 0.0, 0.0
        for att, tr in zip(self.att, self.trans):
            m = att(a, prior)
            prior = prior * (self.gamma - m)
            ent = ent - (m * torch.log(m)).sum(-1).mean()
            a = tr(m * x)
            out = out + F.relu(torch.nan_to_num(a))
        return self.head(out), ent / len(self.trans)
