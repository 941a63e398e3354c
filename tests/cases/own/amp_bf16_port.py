import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.down(F.relu(self.up(x)))


class Ranker(nn.Module):
    def __init__(self, d=10, h=24):
        super().__init__()
        self.embed = nn.Linear(d, h)
        self.blocks = nn.Sequential(Block(h), Block(h))
        self.score = nn.Linear(h, 1)

    def forward(self, x):
        return self.score(self.blocks(self.embed(x))).squeeze(1)


class Trainer:
    def __init__(self, model, lr=1e-2):
        self.model = model
        self.opt = torch.optim.SGD(model.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)

    def backward(self, loss):
        self.opt.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()

    def update(self):
        self.opt.step()

    def fit(self, loader):
        for step, (x, y) in enumerate(loader):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                pred = self.model(x)
            loss = F.smooth_l1_loss(pred.float(), y)
            self.backward(loss)
            self.update()
            print(f"step {step} loss {loss.item():.4f}")


def queries(n=80):
    g = torch.Generator().manual_seed(40)
    x = torch.randn(n, 10, generator=g)
    return TensorDataset(x, x[:, 0] - x[:, 1])


if __name__ == "__main__":
    torch.manual_seed(0)
    Trainer(Ranker()).fit(DataLoader(queries(), batch_size=8))
