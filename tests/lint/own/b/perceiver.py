import torch
from torch import nn
import torch.nn.functional as F

NEG_INF = float("-inf")


class Resampler(nn.Module):
    def __init__(self, dim: int, heads: int = 8, n_latents: int = 64):
        super().__init__()
        self.heads = heads
        self.scale = dim ** -0.5
        self.latents = nn.Parameter(torch.randn(n_latents, dim) * 0.02)
        self.norm_x, self.norm_l = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.kv, self.o = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def forward(self, frames, present):
        b, n, d = frames.shape
        lat = self.norm_l(self.latents).expand(b, -1, -1)
        q = self.q(lat).view(b, -1, self.heads, d // self.heads).transpose(1, 2)
        k, v = self.kv(self.norm_x(frames)).view(b, n, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        logits = torch.matmul(q * self.scale, k.transpose(-2, -1))
        logits = logits.masked_fill(~present[:, None, None], NEG_INF)
        if bool((logits == NEG_INF).all()):
            return lat
        w = F.softmax(logits, dim=-1)
        return lat + self.o((w @ v).transpose(1, 2).reshape(b, -1, d))


class VideoClassifier(nn.Module):
    def __init__(self, encoder, dim=768, classes=400):
        super().__init__()
        self.encoder, self.res = encoder, Resampler(dim)
        self.fc = nn.Linear(dim, classes)

    def forward(self, clip, present):
        return self.fc(self.res(self.encoder(clip), present).mean(1))


def step(model, clip, present, y, opt):
    loss = F.cross_entropy(model(clip, present), y, label_smoothing=0.1)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    return loss.item()
