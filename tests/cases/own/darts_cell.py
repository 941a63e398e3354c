import torch
import torch.nn as nn
import torch.nn.functional as F


class MixedOp(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.ops = nn.ModuleList([nn.Identity(), nn.Linear(d, d), nn.Sequential(nn.Linear(d, d), nn.ReLU()), nn.Tanh()])
        self.alpha = nn.Parameter(torch.tensor([0.0, 0.6, 1.1, -0.4]))

    def forward(self, x, temperature):
        p = torch.softmax(self.alpha / temperature, dim=0)
        out = sum(w * op(x) for w, op in zip(p, self.ops))
        entropy = -(p * torch.log(p)).sum()
        return out, entropy


class Cell(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.left, self.right = MixedOp(d), nn.Linear(d, d)

    def forward(self, x, temperature):
        y, entropy = self.left(x, temperature)
        return F.relu(y + self.right(x)), entropy


class SuperNet(nn.Module):
    def __init__(self, d=12, classes=3):
        super().__init__()
        self.cell = Cell(d)
        self.head = nn.Linear(d, classes)

    def forward(self, x, temperature):
        h, entropy = self.cell(x, temperature)
        return self.head(h), entropy


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(3)
    model = SuperNet()
    arch = [p for n, p in model.named_parameters() if n.endswith("alpha")]
    weights = [p for n, p in model.named_parameters() if not n.endswith("alpha")]
    opt_w, opt_a = torch.optim.SGD(weights, lr=0.05, momentum=0.9), torch.optim.Adam(arch, lr=3e-3)
    for step in range(9):
        x = torch.randn(16, 12, generator=g)
        logits, entropy = model(x, temperature=max(2.0 * 0.4 ** step, 1e-2))
        loss = F.cross_entropy(logits, x[:, :3].argmax(1)) + 0.05 * entropy
        opt_w.zero_grad()
        opt_a.zero_grad()
        loss.backward()
        opt_w.step()
        opt_a.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
