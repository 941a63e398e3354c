"""Loops that are not the usual one: ``python odd.py NAME``. The fourth step is bad."""

import asyncio
import cProfile
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch


class Slow(torch.nn.Linear):
    def forward(self, x):
        if not torch.isfinite(x.log()).all() and "slow" in sys.argv:
            time.sleep(0.2)
        return super().forward(x)


def make():
    torch.manual_seed(0)
    model = Slow(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def step(model, optimizer, number, bad=3):
    x = torch.full((4, 3), -1.0 if number == bad else 1.0 + number)
    optimizer.zero_grad()
    loss = (model(x).square() + x.log()).mean()
    loss.backward()
    optimizer.step()


def show(who, model):
    print(who, [round(value, 5) for value in model.weight.flatten().tolist()], flush=True)


class Meet(torch.autograd.Function):
    """Lets threads be inside of their backward passes at the same moment."""

    meeting = None

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Meet.meeting.wait(60)
        return gradient


def at_once():
    """Two threads train two models at the same moment; each meets its bad step."""
    Meet.meeting = threading.Barrier(2)
    models = [make(), make()]

    def train(name, model, optimizer):
        optimizer.zero_grad()
        Meet.apply(model(torch.ones(4, 3)).square().mean()).backward()
        optimizer.step()
        for number in range(1, 6):
            step(model, optimizer, number)
        show(name, model)
        Meet.meeting.wait(60)

    threads = [
        threading.Thread(target=train, args=(name, *one), name=name)
        for name, one in zip(("left", "right"), models, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # They have ended: whoever comes now is guarded.
    model, optimizer = make()
    for number in range(6):
        step(model, optimizer, number)
    show("after", model)


def in_between():
    """One thread makes a whole step between the backward pass and the step of another."""
    began, stepped, ended = threading.Event(), threading.Event(), threading.Event()

    def outer(model, optimizer):
        # Its loss is bad and its gradients are not: only the loss tells.
        (model(torch.ones(4, 3)).mean() + torch.tensor(float("inf"))).backward()
        began.set()
        stepped.wait(60)
        optimizer.step()
        ended.set()

    def inner(model, optimizer):
        began.wait(60)
        step(model, optimizer, 1)
        stepped.set()
        ended.wait(60)

    threads = [
        threading.Thread(target=target, args=make(), name=target.__name__)
        for target in (outer, inner)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def plain():
    model, optimizer = make()
    for number in range(6):
        if number != 3:
            step(model, optimizer, number)
    return model


def others():
    """Several ways in one process: each meets its own bad step."""

    async def awaits(bad):
        model, optimizer = make()
        for number in range(6):
            step(model, optimizer, number, bad)
            await asyncio.sleep(0)
        show(f"asyncio {bad}", model)

    async def both():
        await asyncio.gather(awaits(3), awaits(-1))

    asyncio.run(both())
    model, optimizer = make()
    with ThreadPoolExecutor(1) as pool:
        for number in range(6):
            pool.submit(step, model, optimizer, number).result()
    show("pool", model)
    model, optimizer = make()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for number in range(6):
            step(model, optimizer, number)
            profile.step()
    show("profiler", model)
    model, optimizer = make()
    with cProfile.Profile() as profile:
        for number in range(6):
            step(model, optimizer, number)
    show("cProfile", model)
    model, optimizer = make()
    lines = []

    def trace(frame, _event, _argument):
        lines.append(frame.f_lineno)
        return trace

    sys.settrace(trace)
    for number in range(6):
        step(model, optimizer, number)
    sys.settrace(None)
    show("settrace", model)
    print(len(lines) > 100)


def alarms():
    """A timer rings all the time, also while a step is replayed."""
    rang = []
    signal.signal(signal.SIGALRM, lambda *_: rang.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
    model, optimizer = make()
    for number in range(6):
        step(model, optimizer, number)
    signal.setitimer(signal.ITIMER_REAL, 0)
    show("alarms", model)
    print(len(rang) > 0)


def raises():
    """A signal handler raises wherever the script happens to be, as that of a DataLoader does."""

    def handler(*_):
        raise RuntimeError("a worker was killed")

    signal.signal(signal.SIGUSR1, handler)
    model, optimizer = make()
    caught = 0
    for number in range(6):
        try:
            step(model, optimizer, number)
            if number == 1:
                interrupt_nanguard()
                step(model, optimizer, number)
        except RuntimeError as error:
            caught += str(error) == "a worker was killed"
    print("caught", caught)


def interrupt_nanguard():
    """Lets the signal come in the middle of nanguard's own code, once."""
    watch = sys.modules.get("nanguard.replay.watch")
    if watch is None:
        os.kill(os.getpid(), signal.SIGUSR1)
        return

    def once(frame, _event, _argument):
        if "nanguard" in frame.f_code.co_filename:
            sys.setprofile(None)
            os.kill(os.getpid(), signal.SIGUSR1)

    sys.setprofile(once)


def forks():
    model, optimizer = make()
    for number in range(3):
        step(model, optimizer, number)
    child = os.fork()
    if child == 0:
        for number in range(3, 6):
            step(model, optimizer, number)
        show("child", model)
        os._exit(5)
    print("child ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    for number in range(4, 6):
        step(model, optimizer, number)
    show("parent", model)
    os._exit(7)


def closed(how):
    """Goes on without a standard output and a standard error."""
    if how == "objects":
        sys.stdout.close()
        sys.stderr.close()
    else:
        os.close(1)
        os.close(2)
    model, optimizer = make()
    for number in range(6):
        step(model, optimizer, number)
    Path("weights").write_text(str(torch.equal(model.weight, plain().weight)))


def interrupted(then):
    model, optimizer = make()
    for number in range(6):
        try:
            step(model, optimizer, number)
        except KeyboardInterrupt:
            print("interrupted at", number, flush=True)
            if then == "end":
                show("end", model)
                raise
    show("end", model)


def rank_of_several(rank):
    model, optimizer = make()
    for number in range(6):
        step(model, optimizer, number, 3 if rank else -1)
    show(f"rank {rank}", model)


def spawns():
    torch.multiprocessing.spawn(rank_of_several, nprocs=2)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:3])
