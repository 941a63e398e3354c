import torch
import torch.nn as nn
import torch.nn.functional as F


def geometric_mean(x, dim):
    return torch.exp(torch.mean(torch.log(x), dim=dim))


class ScaleScores(nn.Module):
    """Similarity per scale in [0, 1], merged by a geometric mean."""

    def __init__(self, levels=3):
        super().__init__()
        self.levels = levels
        self.merge = lambda s: geometric_mean(torch.stack(s, 1), dim=1)

    def forward(self, a, b):
        scores = []
        for _ in range(self.levels):
            num = F.relu((a * b).sum((1, 2)))
            den = (a.pow(2).sum((1, 2)) * b.pow(2).sum((1, 2)) + 1e-8).sqrt()
            scores.append(num / den)
            a, b = F.avg_pool1d(a, 2), F.avg_pool1d(b, 2)
        return self.merge(scores)


class Enhancer(nn.Module):
    def __init__(self, c=6):
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(1, c, 3, padding=1), nn.Tanh(), nn.Conv1d(c, 1, 3, padding=1))

    def forward(self, x):
        return x + 0.1 * self.net(x)


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(70)
    model, score = Enhancer(), ScaleScores()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(9):
        clean = torch.randn(6, 1, 16, generator=g).cumsum(-1)
        noisy = clean + 0.2 * torch.randn(6, 1, 16, generator=g)
        if step == 2:
            clean[1] = noisy[1] = 0.05  # nearly silent
        if step == 5:
            noisy[4] = -noisy[4]  # polarity flipped
        out = model(noisy)
        tone = torch.log(out.pow(2).mean((1, 2)) + 1e-8).mean()
        loss = (1.0 - score(out, clean)).mean() + 0.1 * F.l1_loss(out, clean) + 1e-3 * tone
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
