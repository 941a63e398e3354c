"""Data that can be had only once: of a generator, or of one that belongs to an object."""

import sys

from common import F, Net, batches, digest, show, torch


class World:
    def __init__(self):
        self.samples = batches()

    def act(self):
        return next(self.samples)


class Trainer:
    def __init__(self):
        self.net = Net()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.world = World()

    def step(self, number):
        x, y = self.world.act()
        loss = F.mse_loss(self.net(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        show(number, loss)


def loop():
    net, data = Net(), batches()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    for number in range(12):
        x, y = next(data)
        y = y * 2
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        show(number, loss)
    print(digest(net))


torch.manual_seed(0)
if sys.argv[1] == "name":
    loop()
else:
    trainer = Trainer()
    for number in range(12):
        trainer.step(number)
    print(digest(trainer.net))
