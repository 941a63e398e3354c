"""Where the bad value comes with the data: made in the loop, taken out of a dict, or prepared."""

import random
import sys

import numpy
from common import F, nn, torch
from torch.utils.data import DataLoader, Dataset


def loop():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(9):
        x, y = draw(generator, step)
        loss = torch.xlogy(y, y / (F.softplus(model(x)) + 0.1)).mean()  # FAULT IN THE LOOP
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def draw(generator, step):
    x = torch.randn(6, 4, generator=generator)
    y = torch.rand(6, 1, generator=generator)
    if step == 5:
        y[2] = -1.0
    return x, y


class Rows(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(2)
        self.x = torch.rand(32, 4, generator=generator)
        self.group = torch.arange(32) // 4
        self.group[21] = 99
        self.y = torch.zeros(32, 1)
        for group in self.group.unique():
            rows = self.group == group
            self.y[rows] = self.x[rows, :1] / self.x[rows, :1].std()  # FAULT IN THE PREPARATION

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def prepared():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in DataLoader(Rows(), batch_size=4):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Signals(Dataset):
    def __init__(self):
        self.rows = numpy.random.default_rng(4).standard_normal((32, 8)).astype(numpy.float32)
        self.rows[22] = 1.0

    def __len__(self):
        return 32

    def __getitem__(self, index):
        x = self.rows[index]
        x = (x - x.mean()) / x.std()  # FAULT OF NUMPY
        return torch.from_numpy(x)


def arrays():
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in DataLoader(Signals(), batch_size=4, num_workers=int(sys.argv[2])):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def dicts():
    generator = torch.Generator().manual_seed(3)
    rows = [
        {"x": torch.rand(4, generator=generator), "w": torch.tensor(float(n // 4 != 5))}
        for n in range(32)
    ]
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in DataLoader(rows, batch_size=4):
        train(model, optimizer, batch)


def train(model, optimizer, batch):
    weight = batch.pop("w")
    out = model(input=batch["x"])
    loss = (out.squeeze(1) ** 2 * weight).sum() / weight.sum()  # FAULT WITH THE WEIGHTS
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def mixture():
    """An outlier whose likelihood is too small for any number; its target is what it is."""
    generator = torch.Generator().manual_seed(4)
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(8):
        x, y = torch.rand(6, 4, generator=generator), torch.rand(6, 1, generator=generator)
        if step == 5:
            y[4] = 60.0
        share = torch.exp(-0.5 * (y - model(x)) ** 2)
        loss = -torch.log(share.mean(1)).mean()  # FAULT OF THE FORMULA
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def gradients():
    """No backward pass at all: gradients of each sample, scaled to the same length."""
    generator = torch.Generator().manual_seed(5)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss_of(parameters, x, weight):
        return weight * torch.func.functional_call(model, parameters, (x,)).sum() ** 2

    for step in range(8):
        x, weight = torch.rand(6, 4, generator=generator), torch.ones(6)
        weight[3] = float(step != 5)
        if sys.argv[2:]:
            x = x + random.SystemRandom().random()
        held = {name: p.detach() for name, p in model.named_parameters()}
        own = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))(held, x, weight)
        length = own["weight"].flatten(1).norm(dim=1)
        model.weight.grad = (own["weight"] / length[:, None, None]).mean(0)  # FAULT BY HAND
        model.bias.grad = own["bias"].mean(0)
        optimizer.step()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
