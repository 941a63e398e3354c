import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class ChannelNorm(nn.Module):
    def __init__(self, d, eps=1e-8):
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))
        self.eps = eps

    def forward(self, x):
        centered = x - x.mean(-1, keepdim=True)
        var = (centered * centered).mean(-1, keepdim=True)
        normed = centered / torch.sqrt(var + self.eps)
        return normed * self.gain + self.bias


class Mixer(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.norm = ChannelNorm(d)
        self.fc = nn.Linear(d, d)

    def forward(self, x):
        return x + F.gelu(self.fc(self.norm(x)))


class Tagger(nn.Module):
    def __init__(self, d=16, tags=5):
        super().__init__()
        self.encoder = nn.Sequential(Mixer(d), Mixer(d))
        self.out = nn.Linear(d, tags)

    def forward(self, x):
        return self.out(self.encoder(x))


def load_frames(n=36, t=6, d=16):
    g = torch.Generator().manual_seed(9)
    x = torch.randn(n, t, d, generator=g)
    y = x[..., :5].argmax(-1)
    x[25, 4:] = 0.0  # dropped frames
    return TensorDataset(x.half(), y)


def main():
    torch.manual_seed(0)
    model = Tagger().half()
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, (x, y) in enumerate(DataLoader(load_frames(), batch_size=4)):
        loss = F.cross_entropy(model(x).float().flatten(0, 1), y.flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
