import torch
from torch import nn, optim
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, d: int, h: int):
        super().__init__()
        self.h, self.hd = h, d // h
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.ff = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x, mask):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.h, self.hd).permute(2, 0, 3, 1, 4)
        att = (q @ k.transpose(-2, -1)) * self.hd ** -0.5
        att = att.masked_fill(mask == 0, -1e10)
        y = (att.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d)
        x = x + self.proj(y)
        return x + self.ff(self.ln2(x))


class CodeLM(nn.Module):
    def __init__(self, vocab=50_000, d=512, h=8, layers=6, ctx=1024):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(ctx, d)
        self.blocks = nn.ModuleList(Block(d, h) for _ in range(layers))
        self.head = nn.Linear(d, vocab, bias=False)
        self.register_buffer("tri", torch.ones(ctx, ctx).tril())

    def forward(self, ids):
        t = ids.size(1)
        x = self.tok(ids) + self.pos(torch.arange(t, device=ids.device))
        for blk in self.blocks:
            x = blk(x, self.tri[:t, :t])
        return self.head(x)


def main(batches):
    net = CodeLM().cuda().half()
    opt = optim.AdamW(net.parameters(), lr=3e-4, weight_decay=0.1)
    for step, ids in enumerate(batches):
        logits = net(ids[:, :-1].cuda())
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten().cuda())
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
