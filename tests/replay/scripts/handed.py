"""Losses that a generator hands on to the loop that trains."""

import sys

from common import F, Net, batches, digest, show, torch


def losses(net, seen):
    for x, y in batches():
        x = x * (1 + 0.01 * torch.rand(1))
        seen.append(len(seen))
        yield F.mse_loss(net(x), y)


def parts(net, seen):
    for x, y in batches():
        loss = F.mse_loss(net(x), y)
        seen.append(len(seen))
        yield loss, {"size": loss.detach() * 0}


def shown(given):
    yield from given


def summed(net, seen):
    for x, y in batches():
        yield F.mse_loss(net(x), y) / 2
        seen.append(len(seen))
        yield sum(p.square().sum() for p in net.parameters())


def step_made(optimizer, loss):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def in_head(net, optimizer, seen):
    for step, loss in enumerate(losses(net, seen)):
        loss = 3 * loss
        step_made(optimizer, loss)
        show(step, loss)


def taken_apart(net, optimizer, seen):
    for step, (loss, logs) in enumerate(shown(parts(net, seen))):
        step_made(optimizer, loss + logs["size"])
        show(step, loss)


def by_next(net, optimizer, seen):
    given, step = losses(net, seen), 0
    while True:
        loss = next(given, None)
        if loss is None:
            break
        step_made(optimizer, loss)
        show(step, loss)
        step += 1


def added_up(net, optimizer, seen):
    for step, loss in enumerate(summed(net, seen)):
        loss.backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        show(step, loss)


def left(net, optimizer, seen):
    for step, loss in enumerate(losses(net, seen)):
        show(step, loss)
        if not torch.isfinite(loss):
            continue
        step_made(optimizer, loss)


torch.manual_seed(0)
net, seen = Net(), []
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
{f.__name__: f for f in (in_head, taken_apart, by_next, added_up, left)}[sys.argv[1]](
    net, optimizer, seen
)
print(len(seen), digest(net))
