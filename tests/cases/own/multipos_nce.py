import torch
import torch.nn as nn
import torch.nn.functional as F


class ViewEncoder(nn.Module):
    def __init__(self, d_in=16, d=24, out=12):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(d_in, d), nn.GELU(), nn.LayerNorm(d))
        self.proj = nn.Linear(d, out)

    def forward(self, x):
        return F.normalize(self.proj(self.stem(x)), dim=-1)


class MultiPositiveNCE(nn.Module):
    def __init__(self, temperature=0.1):
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(1.0 / temperature).log())

    def forward(self, query, keys, query_id, key_id):
        sim = self.log_scale.exp() * query @ keys.t()
        positive = query_id.unsqueeze(1) == key_id.unsqueeze(0)
        log_all = torch.logsumexp(sim, dim=1)
        log_pos = torch.logsumexp(sim.masked_fill(~positive, float("-inf")), dim=1)
        return (log_all - log_pos).mean()


def products(g, prototypes, ids, noise=0.2):
    return prototypes[ids] + noise * torch.randn(len(ids), 16, generator=g)


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(77)
    prototypes = torch.randn(30, 16, generator=g)
    photo, text = ViewEncoder(), ViewEncoder()
    criterion = MultiPositiveNCE()
    opt_photo = torch.optim.Adam(photo.parameters(), lr=2e-3)
    opt_text = torch.optim.Adam([*text.parameters(), *criterion.parameters()], lr=1e-3)
    for step in range(8):
        key_id = torch.randint(0, 30, (14,), generator=g)
        query_id = key_id[torch.randperm(14, generator=g)[:10]].clone()
        if step == 5:
            query_id[3] = int((~torch.isin(torch.arange(30), key_id)).nonzero()[0])
        query = photo(products(g, prototypes, query_id))
        keys = text(products(g, prototypes, key_id))
        loss = criterion(query, keys, query_id, key_id)
        for opt in (opt_photo, opt_text):
            opt.zero_grad()
        loss.backward()
        opt_photo.step()
        opt_text.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
