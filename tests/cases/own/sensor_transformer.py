import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        scores = torch.bmm(self.q(x), self.k(x).transpose(1, 2))
        weights = F.softmax(scores * x.shape[-1] ** -0.5, dim=-1)
        return torch.bmm(weights, self.v(x))


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.attn = Attention(d)
        self.norm = nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        x = self.norm(x + self.attn(x))
        return x + self.mlp(x)


class SensorModel(nn.Module):
    def __init__(self, d=32, layers=2, classes=4):
        super().__init__()
        self.blocks = nn.ModuleList([Block(d) for _ in range(layers)])
        self.head = nn.Linear(d, classes)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x.mean(1))


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(22)
    model = SensorModel().half()
    opt = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(8):
        x = 2.0 * torch.randn(4, 10, 32, generator=g)
        y = x[:, 0, :4].argmax(1)
        if step == 5:
            x[1] = x[1] + 400.0  # strain gauge with a drifted offset
        loss = F.cross_entropy(model(x.half()).float(), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
