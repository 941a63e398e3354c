"""Other ways to train: a thread, an optimizer that searches, a generator of one's own."""

import threading

from common import F, Net, batches, digest, show, torch

GENERATOR = torch.Generator().manual_seed(5)


def in_a_thread():
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step, (x, y) in enumerate(batches()):
        loss = F.mse_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        show(step, loss)
    print(digest(net))


def searches():
    net = Net().eval()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
    for step, (x, y) in enumerate(batches()):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.mse_loss(net(x), y)
            loss.backward()
            return loss

        show(step, optimizer.step(closure))
    print(digest(net))


def noisy(x):
    return x * (1 + 0.1 * torch.rand(x.shape, generator=GENERATOR))


def loss_of(net, x, y):
    weight = torch.rand(())
    return F.mse_loss(net(noisy(x)), y) * weight


def with_a_generator():
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step, (x, y) in enumerate(batches()):
        loss = loss_of(net, x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        show(step, loss)
    print(digest(net), torch.rand(1, generator=GENERATOR).item())


torch.manual_seed(0)
thread = threading.Thread(target=in_a_thread)
thread.start()
thread.join()
searches()
with_a_generator()
