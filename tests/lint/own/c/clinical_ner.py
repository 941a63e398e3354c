import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import AutoModel


class Tagger(nn.Module):
    def __init__(self, name: str, n_tags: int):
        super().__init__()
        self.bert = AutoModel.from_pretrained(name)
        self.drop = nn.Dropout(0.2)
        self.cls = nn.Linear(self.bert.config.hidden_size, n_tags)
        self.n_tags = n_tags

    def forward(self, ids, att, tags=None):
        h = self.bert(ids, attention_mask=att).last_hidden_state
        logits = self.cls(self.drop(h))
        if tags is None:
            return logits.argmax(-1)
        active = att.view(-1) == 1
        tags = tags.view(-1)[active].clamp(0, self.n_tags - 1)
        return F.cross_entropy(logits.view(-1, self.n_tags)[active], tags)


def relative_buckets(n: int, k: int = 16, device=None):
    i = torch.arange(n, device=device)
    return (i[None] - i[:, None]).clamp(-k, k) + k


def train(model, loader, lr=3e-5, epochs=4):
    opt = torch.optim.AdamW(model.parameters(), lr=lr)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.0, total_iters=epochs * len(loader))
    for _ in range(epochs):
        for ids, att, tags in loader:
            loss = model(ids.cuda(), att.cuda(), tags.cuda())
            if loss != loss:
                continue
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
