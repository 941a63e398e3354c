import torch
import torch.nn as nn
import torch.nn.functional as F


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.strength * grad, None


class DANN(nn.Module):
    def __init__(self, d=12, h=20, classes=3):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(d, h), nn.Tanh())
        self.classify = nn.Linear(h, classes)
        self.domain = nn.Linear(h, 1)

    def forward(self, x, strength):
        f = self.features(x)
        return self.classify(f), self.domain(Reverse.apply(f, strength)).squeeze(1)


def normalized_gradients(model):
    """Layer-wise normalised gradient descent: every tensor moves by the same amount."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad = p.grad / p.grad.norm()


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(24)
    model = DANN()
    opt = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(9):
        x = torch.randn(16, 12, generator=g)
        y = x[:, :3].argmax(1)
        target = torch.rand(16, generator=g) < 0.5
        labelled = ~target
        if step == 5:
            labelled = torch.zeros(16, dtype=torch.bool)  # only target-domain images were drawn
        logits, dom = model(x, 0.3)
        per_sample = F.cross_entropy(logits, y, reduction="none") * labelled
        loss = per_sample.sum() / 16 + F.binary_cross_entropy_with_logits(dom, target.float())
        opt.zero_grad()
        loss.backward()
        normalized_gradients(model)
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
