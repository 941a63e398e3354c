import torch
import torch.nn as nn
import torch.nn.functional as F


class LinearRecurrence(nn.Module):
    """h_t = U h_{t-1} + W x_t, leaky rectified."""

    def __init__(self, d_in, d):
        super().__init__()
        self.inp = nn.Linear(d_in, d)
        self.rec = nn.Linear(d, d, bias=False)
        nn.init.orthogonal_(self.rec.weight, gain=1.05)

    def forward(self, x):
        h = x.new_zeros(x.shape[0], self.rec.in_features)
        for t in range(x.shape[1]):
            h = F.leaky_relu(self.inp(x[:, t]) + self.rec(h), 0.5)
        return h


class AddingModel(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.memory = LinearRecurrence(2, d)
        self.readout = nn.Linear(d, 1)

    def forward(self, x):
        return self.readout(self.memory(x)).squeeze(-1)


def adding_batch(g, n=16, length=120):
    values = torch.rand(n, length, generator=g)
    marks = torch.zeros(n, length)
    first = torch.randint(0, length // 2, (n,), generator=g)
    second = torch.randint(length // 2, length, (n,), generator=g)
    marks[torch.arange(n), first] = 1.0
    marks[torch.arange(n), second] = 1.0
    return torch.stack([values, marks], -1), (values * marks).sum(1)


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(10)
    model = AddingModel()
    opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step in range(14):
        x, y = adding_batch(g)
        loss = F.l1_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
