import numpy as np
import torch
from torch import nn


class CoAttention(nn.Module):
    def __init__(self, d_model=512, n_heads=8):
        super().__init__()
        self.d_model, self.n_heads = d_model, n_heads
        self.wq, self.wk, self.wv = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)

    def heads(self, x):
        return x.view(x.size(0), -1, self.n_heads, self.d_model // self.n_heads).transpose(1, 2)

    def forward(self, question, regions, region_mask):
        q, k, v = self.heads(self.wq(question)), self.heads(self.wk(regions)), self.heads(self.wv(regions))
        att = torch.matmul(q, k.transpose(-2, -1)) / np.sqrt(self.d_model)
        att = att.masked_fill(region_mask[:, None, None, :] == 0, -1e9)
        out = torch.matmul(torch.softmax(att, -1), v)
        return out.transpose(1, 2).flatten(2)


class VQA(nn.Module):
    def __init__(self, q_enc, d=512, answers=3129):
        super().__init__()
        self.q_enc, self.co = q_enc, CoAttention(d)
        self.cls = nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, answers))

    def forward(self, q, regions, mask):
        h = self.co(self.q_enc(q), regions, mask).mean(1)
        h = h.nan_to_num(0.0)
        return self.cls(h)


def loss_fn(logits, soft_scores):
    return nn.functional.binary_cross_entropy_with_logits(logits, soft_scores) * soft_scores.size(1)
