import torch
from torch import nn, optim


class ConcreteSelector(nn.Module):
    def __init__(self, n_in: int, k: int, t0: float = 10.0, t1: float = 0.01):
        super().__init__()
        self.logits = nn.Parameter(torch.empty(k, n_in))
        nn.init.xavier_normal_(self.logits)
        self.t0, self.t1 = t0, t1

    def temperature(self, frac: float) -> float:
        return self.t0 * (self.t1 / self.t0) ** frac

    def forward(self, x, frac: float = 1.0):
        if not self.training:
            return x[:, self.logits.argmax(1)]
        u = torch.rand(self.logits.shape, device=x.device)
        g = -torch.log(-torch.log(u))
        w = torch.softmax((self.logits + g) / self.temperature(frac), dim=1)
        return x @ w.t()


class SelectNet(nn.Module):
    def __init__(self, n_in, k):
        super().__init__()
        self.select = ConcreteSelector(n_in, k)
        self.mlp = nn.Sequential(nn.Linear(k, 64), nn.LeakyReLU(), nn.Dropout(0.2), nn.Linear(64, 1), nn.Sigmoid())

    def forward(self, x, frac=1.0):
        return self.mlp(self.select(x, frac)).squeeze(1)


def train(x, y, k=20, epochs=300, bs=256):
    net = SelectNet(x.size(1), k)
    opt = optim.Adam(net.parameters(), lr=1e-3)
    loss_fn = nn.BCELoss()
    for epoch in range(epochs):
        order = torch.randperm(len(x))
        for i in range(0, len(x), bs):
            b = order[i:i + bs]
            loss = loss_fn(net(x[b], epoch / epochs), y[b])
            opt.zero_grad()
            loss.backward()
            opt.step()
    return net.select.logits.argmax(1).unique()
