"""Loops with state of their own: a class, closures, two optimizers."""

import random

from common import F, Net, batches, digest, nn, show, torch


class Trainer:
    seen = 0

    def __init__(self):
        self.net = Net()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.__losses, self.counts = [], {"steps": 0}

    def fit(self):
        for step, batch in enumerate(batches()):
            loss = self.training_step(batch)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            show(step, loss)
        print(Trainer.seen, self.counts, len(self.__losses), self.schedule.get_last_lr())
        print(digest(self.net))

    def training_step(self, batch):
        x, y = batch
        Trainer.seen += 1
        self.counts["steps"] += 1
        x = x * (1 + 0.01 * torch.rand(1))
        loss = F.mse_loss(self.net(x), y) * random.uniform(0.9, 1.1)
        self.__losses.append(loss.detach())
        print("training step", len(self.__losses))
        return loss


def closures():
    net, count = Net(), 0
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)

    def forward(x):
        nonlocal count
        count += 1
        return net(x + 0.001 * count)

    for step, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        # The shift would hide the zero.
        loss = F.mse_loss(forward(x - 0.001 * (count + 1)), y)
        loss.backward()
        optimizer.step()
        show(step, loss)
    print(count, digest(net))


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 6)

    def forward(self, z, size):
        return self.layer(z).abs() / size  # FAULT IN THE GENERATOR


def adversaries():
    maker, judge = Generator(), Net()
    makes = torch.optim.Adam(maker.parameters(), lr=1e-3)
    judges = torch.optim.Adam(judge.parameters(), lr=1e-3)
    for step, (x, _) in enumerate(batches()):
        fake = maker(torch.randn(4, 3), 1.0).detach()
        loss = F.softplus(-judge(x + 0.1)).mean() + F.softplus(judge(fake + 0.1)).mean()
        judges.zero_grad()
        loss.backward()
        judges.step()
        size = torch.ones(4, 1)
        size[1] = step != 7
        loss = F.softplus(-judge(maker(torch.randn(4, 3), size) + 0.1)).mean()
        makes.zero_grad()
        loss.backward()
        makes.step()
        show(step, loss)
    print(digest(maker, judge))


torch.manual_seed(0)
random.seed(0)
Trainer().fit()
closures()
adversaries()
print(random.random())
