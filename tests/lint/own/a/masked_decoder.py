import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class MaskedDecoder(nn.Module):
    def __init__(self, d_model: int, nhead: int):
        super().__init__()
        self.nhead = nhead
        self.d_k = d_model // nhead
        self.d_model = d_model
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(d_model, d_model) for _ in range(3))
        self.o_proj = nn.Linear(d_model, d_model)

    def _split(self, x):
        return x.view(x.size(0), -1, self.nhead, self.d_k).transpose(1, 2)

    def _weights(self, scores):
        if torch.all(scores == float("-inf")):
            return torch.zeros_like(scores)
        w = torch.softmax(scores, dim=-1)
        return torch.nan_to_num_(w)

    def forward(self, x, memory, keep):
        q = self._split(self.q_proj(x)).mul(self.d_model ** -0.5)
        k, v = self._split(self.k_proj(memory)), self._split(self.v_proj(memory))
        scores = (q @ k.transpose(2, 3)).masked_fill(keep[:, None, None].eq(0), float("-inf"))
        out = self._weights(scores) @ v
        return self.o_proj(out.transpose(1, 2).flatten(2))


class RowSafeDecoder(MaskedDecoder):
    def _weights(self, scores):
        empty = torch.isneginf(scores).all(dim=-1, keepdim=True)
        w = torch.softmax(scores.masked_fill(empty, 0.0), dim=-1)
        return w.masked_fill(empty, 0.0)

    def forward(self, x, memory, keep):
        q = self._split(self.q_proj(x)) / math.sqrt(self.d_k)
        k, v = self._split(self.k_proj(memory)), self._split(self.v_proj(memory))
        scores = (q @ k.transpose(2, 3)).masked_fill(keep[:, None, None].eq(0), float("-inf"))
        return self.o_proj((self._weights(scores) @ v).transpose(1, 2).flatten(2))


def lm_loss(logits, labels):
    if (labels == -100).all():
        return logits.sum() * 0.0
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
