import torch
import torch.nn as nn
import torch.nn.functional as F


class FeatureBank(nn.Module):
    """Ring buffer of past features, kept in half to save memory."""

    def __init__(self, size=40, d=12):
        super().__init__()
        self.register_buffer("items", torch.zeros(size, d, dtype=torch.float16))
        self.ptr = 0

    @torch.no_grad()
    def enqueue(self, feats):
        packed = feats.detach().to(torch.float16)
        self.items[self.ptr:self.ptr + len(packed)] = packed
        self.ptr = (self.ptr + len(packed)) % len(self.items)

    def forward(self, q, k, start):
        keys = self.items[start:start + 16].float()
        scores = q @ keys.t() / (1.0 + keys.norm(dim=1))
        self.enqueue(k)
        return scores


class MoCo(nn.Module):
    def __init__(self, d_in=8, d=12):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(d_in, 24), nn.ReLU(), nn.Linear(24, d))
        self.bank = FeatureBank(d=d)

    def forward(self, query, key, start):
        q = F.normalize(self.encoder(query), dim=1)
        with torch.no_grad():
            k = self.encoder(key)
        positive = (q * F.normalize(k, dim=1)).sum(1, keepdim=True)
        negative = self.bank(q, k, start)
        return torch.cat([positive, negative], 1) / 0.2


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(33)
    model = MoCo()
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    for step in range(10):
        query = torch.randn(8, 8, generator=g)
        key = query + 0.1 * torch.randn(8, 8, generator=g)
        if step == 2:
            key[3] *= 4.0e5  # raw counts instead of log counts
        start = 0 if step < 5 else 8
        logits = model(query, key, start)
        loss = F.cross_entropy(logits, torch.zeros(8, dtype=torch.long))
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
