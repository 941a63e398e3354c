import torch
import torch.nn as nn
import torch.nn.functional as F

MASKED = -1e10


class PointerHead(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.start, self.end = nn.Linear(d, 1), nn.Linear(d, 1)

    def forward(self, h, question_mask):
        s = self.start(h).squeeze(-1)
        e = self.end(h).squeeze(-1)
        s = s.masked_fill(question_mask, MASKED)
        e = e.masked_fill(question_mask, MASKED)
        return s, e


def best_span(s, e, max_len=30):
    joint = s.float()[:, :, None] + e.float()[:, None, :]
    band = torch.triu(torch.ones_like(joint)).tril(max_len - 1).bool()
    joint = joint.masked_fill(~band, MASKED)
    flat = joint.flatten(1).argmax(-1)
    return flat // joint.size(-1), flat % joint.size(-1)


def train(encoder, head, loader, opt, epochs=2):
    scaler = torch.amp.GradScaler("cuda")
    params = [*encoder.parameters(), *head.parameters()]
    for _ in range(epochs):
        for ids, att, qmask, ys, ye in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                h = encoder(input_ids=ids, attention_mask=att).last_hidden_state
                s, e = head(h, qmask)
                loss = F.cross_entropy(s, ys) + F.cross_entropy(e, ye)
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(params, 1.0)
            scaler.step(opt)
            scaler.update()
