import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint


class CrossBlock(nn.Module):
    def __init__(self, d=16, heads=2):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.attn = nn.MultiheadAttention(d, heads, batch_first=True)
        self.ffn = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, ego, agents, absent):
        context, _ = self.attn(self.norm(ego), agents, agents, key_padding_mask=absent)
        ego = ego + context
        return ego + self.ffn(ego)


class TrajectoryNet(nn.Module):
    def __init__(self, d=16, depth=2, horizon=5):
        super().__init__()
        self.ego = nn.Linear(4, d)
        self.agent = nn.Linear(4, d)
        self.blocks = nn.ModuleList([CrossBlock(d) for _ in range(depth)])
        self.head = nn.Linear(d, horizon * 2)

    def forward(self, ego, agents, absent):
        h, ctx = self.ego(ego).unsqueeze(1), self.agent(agents)
        for block in self.blocks:
            h = checkpoint(block, h, ctx, absent, use_reentrant=False)
        return self.head(h.squeeze(1)).unflatten(1, (-1, 2))


def scenes(g, step, n=6, m=7):
    ego = torch.randn(n, 4, generator=g)
    agents = torch.randn(n, m, 4, generator=g)
    count = torch.randint(1, m + 1, (n,), generator=g)
    if step == 5:
        count[2] = 0
    absent = torch.arange(m) >= count[:, None]
    future = ego[:, None, 2:] * torch.arange(1, 6)[None, :, None] * 0.1
    return ego, agents.masked_fill(absent[..., None], 0.0), absent, future


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(8)
    model = TrajectoryNet()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(8):
        ego, agents, absent, future = scenes(g, step)
        loss = (model(ego, agents, absent) - future).norm(dim=-1).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
