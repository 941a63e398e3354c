import torch
from torch import nn
import torch.nn.functional as F


class ChunkAttention(nn.Module):
    def __init__(self, embed_dim=768, num_heads=12, chunk=256):
        super().__init__()
        self.num_heads, self.head_dim, self.chunk = num_heads, embed_dim // num_heads, chunk
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(embed_dim, embed_dim) for _ in range(3))

    def shape(self, t):
        b, n, _ = t.shape
        return t.view(b, n // self.chunk, self.chunk, self.num_heads, self.head_dim).transpose(2, 3)

    def forward(self, x, attention_mask):
        q, k, v = self.shape(self.q_proj(x)), self.shape(self.k_proj(x)), self.shape(self.v_proj(x))
        s = torch.matmul(q, k.transpose(-1, -2)) / self.head_dim ** 0.5
        dead = attention_mask.view(x.size(0), -1, 1, 1, self.chunk) == 0
        s.masked_fill_(dead, -1e10)
        y = F.softmax(s, dim=-1) @ v
        return y.transpose(2, 3).reshape(x.shape)


def train(model, loader, optimizer, epochs=2):
    scaler = torch.cuda.amp.GradScaler()
    for _ in range(epochs):
        for ids, mask, y in loader:
            optimizer.zero_grad()
            with torch.cuda.amp.autocast(dtype=torch.float16):
                logits = model(ids.cuda(), mask.cuda())
                loss = F.cross_entropy(logits, y.cuda())
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if not torch.isnan(norm):
                scaler.step(optimizer)
            scaler.update()
