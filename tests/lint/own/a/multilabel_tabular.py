import torch
from torch import nn, optim
from torch.autograd import set_detect_anomaly

set_detect_anomaly(True)


class Net(nn.Module):
    def __init__(self, d_in, n_labels, width=256, depth=3):
        super().__init__()
        layers = [nn.Linear(d_in, width), nn.ReLU()]
        for _ in range(depth - 1):
            layers += [nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()]
        layers += [nn.Linear(width, n_labels), nn.Sigmoid()]
        self.body = nn.Sequential(*layers)

    def forward(self, x):
        return self.body(x)


def class_weights(y):
    pos = y.sum(0)
    return (len(y) - pos) / pos


def standardise(x, eps=1e-6):
    return (x - x.mean(0)) / (x.std(0, unbiased=False) + eps)


def fit(x, y, x_val, y_val, epochs=100):
    net = Net(x.size(1), y.size(1))
    crit = nn.BCELoss(reduction="none")
    w = class_weights(y)
    x, x_val = torch.nan_to_num(x, nan=0.0), torch.nan_to_num(x_val, nan=0.0)  # missing cells
    opt = optim.Adam(net.parameters(), lr=1e-3, weight_decay=1e-5)
    best = float("inf")
    for epoch in range(epochs):
        net.train()
        for idx in torch.randperm(len(x)).split(512):
            loss = (crit(net(x[idx]), y[idx]) * (1 + y[idx] * w)).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
        net.eval()
        with torch.no_grad():
            val = crit(net(x_val), y_val).mean().item()
        if val < best:
            best = val
            torch.save(net.state_dict(), "best.pt")
    net.load_state_dict(torch.load("best.pt", weights_only=True))
    return net
