import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Router(nn.Module):
    def __init__(self, d, experts):
        super().__init__()
        self.gate = nn.Linear(d, experts)

    def entropy(self, p):
        plogp = torch.where(
            p > 0,
            p * torch.log(p),
            torch.zeros_like(p),
        )
        return -plogp.sum(-1).mean()

    def forward(self, x):
        p = F.softmax(self.gate(x), dim=-1)
        return p, self.entropy(p)


class MoE(nn.Module):
    def __init__(self, d=8, experts=4):
        super().__init__()
        self.router = Router(d, experts)
        self.experts = nn.ModuleList([nn.Linear(d, d) for _ in range(experts)])

    def forward(self, x):
        p, entropy = self.router(x)
        y = torch.stack([e(x) for e in self.experts], -1)
        return torch.tanh((y * p.unsqueeze(1)).sum(-1)), entropy


class Model(nn.Module):
    def __init__(self, d=8, classes=3, depth=2):
        super().__init__()
        self.layers = nn.ModuleList([MoE(d) for _ in range(depth)])
        self.head = nn.Linear(d, classes)

    def forward(self, x):
        total = 0.0
        for layer in self.layers:
            x, entropy = checkpoint(layer, x, use_reentrant=False)
            total = total + entropy
        return self.head(x), total


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(80)
    model = Model()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(8):
        x = torch.randn(10, 8, generator=g)
        if step == 4:
            x[6] *= 150.0  # un-normalised row
        logits, entropy = model(x)
        loss = F.cross_entropy(logits, x[:, :3].argmax(1)) - 0.01 * entropy
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
