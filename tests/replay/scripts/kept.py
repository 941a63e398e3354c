"""Where a bad value was there before the step, or would stay behind after it."""

import asyncio
import sys
import types

from common import nn, torch


def train(model, steps, *, x=lambda step: torch.randn(8, 4), loss_of=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        found = model(x(step))
        loss = (found - 1.0).square().mean() if loss_of is None else loss_of(found, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("loss", loss.item())


class Weighted(nn.Module):
    """Weighs what it finds by a table that it has made when it was made itself."""

    def __init__(self, size=12):
        super().__init__()
        self.size = size
        self.inner = nn.Linear(4, 1)
        self.register_buffer("weights", 1.0 / torch.arange(size).float())  # FAULT OF THE TABLE
        self.at = 11

    def forward(self, x):
        self.at = self.at - 1
        return self.inner(x) * self.weights[self.at]


def table():
    train(Weighted(), 12)


def assigned():
    model = nn.Linear(4, 1)
    levels = torch.linspace(-1.0, 1.0, 9)
    offsets = torch.log(levels + 1.0)  # FAULT OF THE VARIABLE
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(9):
        loss = (model(torch.randn(8, 4)) + offsets[8 - step]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Centred(nn.Module):
    """Keeps what it knows of its inputs in plain attributes."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 1)
        self.mean, self.seen = torch.zeros(4), torch.zeros(())

    def forward(self, x):
        self.seen += len(x)
        self.mean = self.mean + (x.mean(0) - self.mean) * len(x) / self.seen
        return self.inner(x - self.mean)


def attributes():
    def x(step):
        return torch.randn(8, 4) if step != 7 else torch.full((8, 4), torch.nan)

    model = Centred()
    train(model, 12, x=x)
    print("mean", model.mean.tolist(), model.seen.item())


class Cooled(Centred):
    """Has a number that the script sets, too, and a mask."""

    def __init__(self):
        super().__init__()
        self.mask = torch.full((4,), -torch.inf)
        self.inner = nn.Linear(4, 1)
        self.cool = nn.Identity()
        self.cool.by = torch.ones(())

    def forward(self, x):
        return super().forward(x) / self.cool.by


def chosen():
    """The script sets a number for all steps to come, right before the one that is bad."""
    model = Cooled()

    def x(step):
        if step == 7:
            model.cool.by = torch.full((), 2.0)
        return torch.randn(8, 4) if step != 7 else torch.full((8, 4), torch.nan)

    train(model, 12, x=x)
    print("by", model.cool.by.item(), model.seen.item())


class Asleep(types.ModuleType):
    """A module that is imported once somebody asks for something in it, and then fails."""

    def __getattr__(self, name):
        if "inspect.py" in sys._getframe(1).f_code.co_filename:
            raise AttributeError(name)  # torch looks through all modules, too
        raise ImportError("nobody is to wake this module")


def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum()  # FAULT OF THE MASK


def lazy():
    sys.modules["asleep"] = Asleep("asleep")
    train(nn.Linear(4, 1), 12, loss_of=empty_once)


def empty_once(found, step):
    return masked_mean(found.square(), torch.full_like(found, float(step != 7)))


def hollow():
    """A parameter that has no values yet: some libraries make their models in two passes."""
    model = nn.Sequential(nn.Linear(4, 1))
    with torch.device("meta"):
        model.register_parameter("unused", nn.Parameter(torch.empty(3)))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.01)
    for step in range(12):
        loss = empty_once(model(torch.randn(8, 4)), step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def collected(model, count):
    """Collects what a few steps are made with, as reinforcement learning does."""
    with torch.no_grad():
        x = torch.randn(8, 4)
        score = (model(x) + torch.randn(8, 1)).round() * (count != 2)
        gain = (score - score.mean()) / score.std()  # FAULT OF THE ROLLOUT
    return x, gain


def rollout():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for count in range(4):
        x, gain = collected(model, count)
        for _ in range(4):
            loss = (model(x) * gain).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print("loss", loss.item())


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        for number in range(48):
            x = torch.full((4,), number / 48)
            yield torch.log(x) if number == 30 else x / (number != 29)  # FAULT OF THE STREAM


def stream():
    loader = torch.utils.data.DataLoader(Stream(), batch_size=4, num_workers=1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in loader:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def waiting():
    async def batch(step):
        await asyncio.sleep(0)
        return torch.randn(8, 4), torch.tensor(float(step != 7))

    async def loop():
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(12):
            x, count = await batch(step)
            loss = model(x).square().sum() * count / count  # FAULT OF THE COROUTINE
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print("loss", loss.item())

    asyncio.run(loop())


torch.manual_seed(0)
globals()[sys.argv[1]]()
