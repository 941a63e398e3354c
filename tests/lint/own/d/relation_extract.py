import torch
from torch import nn
import torch.nn.functional as F


class SpanPooler(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.score = nn.Linear(d, 1)

    def forward(self, h, span_mask):
        s = self.score(h).squeeze(-1)
        s = s.masked_fill(span_mask == 0, float("-inf"))
        if torch.isinf(s).all():
            return h.mean(1)
        a = torch.softmax(s, dim=1)
        return (a.unsqueeze(-1) * h).sum(1)


class MeanPooler(nn.Module):
    def forward(self, h, span_mask):
        m = span_mask.unsqueeze(-1).float()
        return (h * m).sum(1) / m.sum(1).clamp(min=1e-6)


class RelationModel(nn.Module):
    def __init__(self, encoder, d, relations):
        super().__init__()
        self.encoder, self.pool = encoder, SpanPooler(d)
        self.cls = nn.Sequential(nn.Linear(2 * d, d), nn.Tanh(), nn.Dropout(0.1), nn.Linear(d, relations))

    def forward(self, ids, mask, head_mask, tail_mask, y=None):
        h = self.encoder(ids, attention_mask=mask).last_hidden_state
        logits = self.cls(torch.cat([self.pool(h, head_mask), self.pool(h, tail_mask)], -1))
        if y is None:
            return logits
        loss = F.cross_entropy(logits, y)
        if torch.isnan(loss) or torch.isinf(loss):
            loss = torch.tensor(0.0, device=loss.device, requires_grad=True)
        return loss
