import torch
from torch import nn


class CrossEncoder(nn.Module):
    def __init__(self, vocab, dim=384, depth=6, heads=12):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.q = nn.ModuleList(nn.Linear(dim, dim) for _ in range(depth))
        self.kv = nn.ModuleList(nn.Linear(dim, 2 * dim) for _ in range(depth))
        self.heads = heads
        self.score = nn.Linear(dim, 1)

    def forward(self, ids, attention_mask):
        h = self.tok(ids)
        b, t, d = h.shape
        ext = attention_mask[:, None, None, :].to(h.dtype)
        ext = (1.0 - ext) * -1e9
        for q, kv in zip(self.q, self.kv):
            qh = q(h).view(b, t, self.heads, -1).transpose(1, 2)
            k, v = kv(h).view(b, t, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
            att = qh @ k.transpose(-1, -2) / (d // self.heads) ** 0.5 + ext
            h = h + (att.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d)
        return self.score(h[:, 0]).squeeze(-1)


@torch.inference_mode()
def rerank(model, tok, query, docs, bs=64):
    model = model.half().cuda()
    scores = []
    for i in range(0, len(docs), bs):
        enc = tok([query] * len(docs[i:i + bs]), docs[i:i + bs], padding=True, truncation=True, return_tensors="pt").to("cuda")
        scores.append(model(enc["input_ids"], enc["attention_mask"]).float().cpu())
    order = torch.cat(scores).argsort(descending=True)
    return [docs[i] for i in order.tolist()]
