import torch
from torch import nn
import torch.nn.functional as F


class CodeLM(nn.Module):
    def __init__(self, vocab=32000, d=1024, heads=16, layers=12):
        super().__init__()
        self.tok = nn.Embedding(vocab, d)
        self.pos = nn.Parameter(torch.empty(1, 2048, d))
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(d, heads, 4 * d, batch_first=True, norm_first=True) for _ in range(layers))
        self.norm = nn.LayerNorm(d)
        self.apply(self._init)

    def _init(self, m):
        if isinstance(m, (nn.Linear, nn.Embedding)):
            nn.init.normal_(m.weight, std=0.02)

    def forward(self, ids):
        t = ids.size(1)
        causal = torch.triu(torch.full((t, t), -1e9, dtype=torch.float16, device=ids.device), 1)
        h = self.tok(ids) + self.pos[:, :t]
        for blk in self.blocks:
            h = blk(h, src_mask=causal)
        return self.norm(h) @ self.tok.weight.t()


def main(batches, steps=20_000):
    model = CodeLM().cuda().to(torch.half)
    opt = torch.optim.NAdam(model.parameters(), lr=2e-4, eps=1e-8)
    for step in range(steps):
        ids = next(batches).cuda()
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if step % 100 == 0:
            print(f"{step} {loss.item():.3f}")
