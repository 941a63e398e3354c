import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.use_deterministic_algorithms(True)


class Adapter(nn.Module):
    def __init__(self, d, rank=4):
        super().__init__()
        self.down = nn.Linear(d, rank, bias=False)
        self.up = nn.Parameter(torch.zeros(d, rank))
        self.shift = nn.Parameter(torch.empty(d))

    def forward(self, x):
        return x + F.linear(self.down(x), self.up, self.shift)


class Layer(nn.Module):
    def __init__(self, d, adapt):
        super().__init__()
        self.ff = nn.Linear(d, d)
        self.adapter = Adapter(d) if adapt else nn.Identity()

    def forward(self, x, use_adapter):
        h = torch.tanh(self.ff(x))
        return self.adapter(h) if use_adapter else h


class Backbone(nn.Module):
    def __init__(self, d=16, classes=3):
        super().__init__()
        self.layers = nn.ModuleList([Layer(d, adapt=False), Layer(d, adapt=True)])
        self.cls = nn.Linear(d, classes)

    def forward(self, x, use_adapter=False):
        x = self.layers[0](x, False)
        x = self.layers[1](x, use_adapter)
        return self.cls(x)


def main():
    torch.manual_seed(0)
    x = torch.randn(40, 16)
    y = x[:, :3].argmax(1)
    model = Backbone()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step, (xb, yb) in enumerate(DataLoader(TensorDataset(x, y), batch_size=5)):
        loss = F.cross_entropy(model(xb, use_adapter=step >= 3), yb)  # adapters join after warm-up
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
