import torch
from torch import nn
import torch.nn.functional as F


class RelAttention(nn.Module):
    def __init__(self, d=512, heads=8, buckets=32):
        super().__init__()
        self.heads, self.hd = heads, d // heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.rel = nn.Embedding(buckets, heads)

    def forward(self, x, bucket, keep):
        b, n, d = x.shape
        q = self.q(x).view(b, n, self.heads, self.hd).transpose(1, 2)
        k = self.k(x).view(b, n, self.heads, self.hd).transpose(1, 2)
        v = self.v(x).view(b, n, self.heads, self.hd).transpose(1, 2)
        s = q @ k.mT * self.hd ** -0.5 + self.rel(bucket).permute(2, 0, 1)
        s = torch.where(keep[:, None, None, :], s, -1e9)
        return self.o((s.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d))


def finetune(net: nn.Module, head: nn.Linear, loader, lr=1e-4):
    net.half()
    head.half()
    net.cuda(), head.cuda()
    opt = torch.optim.Adam(list(net.parameters()) + list(head.parameters()), lr=lr, betas=(0.9, 0.98))
    for x, bucket, keep, y in loader:
        logits = head(net(x.half().cuda(), bucket.cuda(), keep.cuda()).mean(1))
        loss = F.cross_entropy(logits.float(), y.cuda())
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
