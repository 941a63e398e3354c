import torch
import torch.nn as nn
import torch.nn.functional as F


class LARS(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, momentum=0.9, trust=0.02):
        super().__init__(params, {"lr": lr, "momentum": momentum, "trust": trust})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                update = p.grad
                if p.dim() > 1:
                    w_norm, g_norm = p.norm(), p.grad.norm()
                    ratio = torch.where(w_norm > 0, w_norm / g_norm, torch.ones_like(w_norm))
                    update = p.grad * (group["trust"] * ratio)
                buf = self.state[p].setdefault("mu", torch.zeros_like(p))
                buf.mul_(group["momentum"]).add_(update)
                p.add_(buf, alpha=-group["lr"])


class TwoTower(nn.Module):
    def __init__(self, d=8, h=16, classes=3):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(d, h), nn.ReLU())
        self.text = nn.Sequential(nn.Linear(d, h), nn.ReLU())
        self.head = nn.Linear(h, classes)
        nn.init.zeros_(self.head.weight)

    def forward(self, image, text, has_text):
        return self.head(self.image(image) + self.text(text) * has_text.unsqueeze(1))


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(26)
    model = TwoTower()
    nn.init.normal_(model.head.weight, std=0.02, generator=g)
    opt = LARS(model.parameters())
    for step in range(9):
        image, text = torch.randn(10, 8, generator=g), torch.randn(10, 8, generator=g)
        has_text = (torch.rand(10, generator=g) < 0.5).float()
        if step == 4:
            has_text = torch.zeros(10)  # no captions in this shard
        y = (image[:, :3] + 0.2 * text[:, :3]).argmax(1)
        loss = F.cross_entropy(model(image, text, has_text), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
