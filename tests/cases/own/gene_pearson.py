import torch
import torch.nn as nn


class ExpressionNet(nn.Module):
    def __init__(self, motifs=20, genes=15, hidden=32):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(motifs, hidden), nn.BatchNorm1d(hidden), nn.ReLU())
        self.decoder = nn.Linear(hidden, genes)

    def forward(self, x):
        return self.decoder(self.encoder(x))


class PearsonLoss(nn.Module):
    def forward(self, pred, target):
        p = pred - pred.mean(dim=1, keepdim=True)
        t = target - target.mean(dim=1, keepdim=True)
        covariance = (p * t).sum(dim=1)
        spread = p.square().sum(dim=1).sqrt() * t.square().sum(dim=1).sqrt()
        corr = covariance / spread
        return 1.0 - corr.mean()


def cells(g, mixing, step, n=9):
    motifs = torch.rand(n, 20, generator=g)
    counts = torch.poisson((motifs @ mixing).clamp(min=0), generator=g)
    if step == 5:
        counts[6] = 0.0
    return motifs, torch.log1p(counts)


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(66)
    mixing = torch.randn(20, 15, generator=g)
    model, pearson, mse = ExpressionNet(), PearsonLoss(), nn.MSELoss()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=1e-2, total_steps=8)
    for step in range(8):
        motifs, expression = cells(g, mixing, step)
        pred = model(motifs)
        loss = mse(pred, expression) + 0.5 * pearson(pred, expression)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
