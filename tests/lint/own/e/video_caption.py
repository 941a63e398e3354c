import torch
from torch import nn
import torch.nn.functional as F


class Captioner(nn.Module):
    def __init__(self, feat: int, vocab: int, hidden: int = 512):
        super().__init__()
        self.proj = nn.Linear(feat, hidden)
        self.emb = nn.Embedding(vocab, hidden)
        self.cell = nn.LSTMCell(2 * hidden, hidden)
        self.out = nn.Linear(hidden, vocab)

    def forward(self, frames, tokens):
        ctx = self.proj(frames).mean(1)
        h = c = torch.zeros_like(ctx)
        logits = []
        for t in range(tokens.size(1) - 1):
            h, c = self.cell(torch.cat([ctx, self.emb(tokens[:, t])], -1), (h, c))
            logits.append(self.out(h))
        return torch.stack(logits, 1)


def train(model, loader, epochs=20):
    opt = torch.optim.Adam(model.parameters(), lr=4e-4)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for frames, tokens in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                logits = model(frames.cuda(), tokens.cuda())
                loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten().cuda(), ignore_index=0)
            if not torch.isfinite(loss):
                loss = torch.zeros((), device="cuda", requires_grad=True)
            opt.zero_grad()
            scaler.scale(loss).backward()
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
            scaler.step(opt)
            scaler.update()
        print(f"epoch {epoch} loss {loss.item():.3f}")
