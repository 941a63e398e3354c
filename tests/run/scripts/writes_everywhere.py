# ruff: noqa: PTH123, PTH202, SIM115
"""Writes to whatever was opened before, in each step, by all names that it can have."""

import mmap
import multiprocessing
import os
import socket
import subprocess
import sys
from multiprocessing import shared_memory
from os import write as early_write

import numpy as np
import torch

STEPS = 6
for name in ("number", "early", "map", "array"):
    with open(name, "wb") as file:
        file.write(bytes(64))
number, early = (os.open(name, os.O_RDWR | os.O_APPEND) for name in ("number", "early"))
opened = mmap.mmap(os.open("map", os.O_RDWR), 64)
array = np.memmap("array", dtype="u1", mode="r+")
here, there = socket.socketpair()
cat = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=open("cat", "wb"), bufsize=0)
shared = shared_memory.SharedMemory(create=True, size=64)
counter = multiprocessing.Value("i", 0)


class Holder:
    """Has files in a list and in a table."""

    def __init__(self):
        self.files = [open("listed", "ab", buffering=0)]
        self.by_name = {"a": open("named", "ab", buffering=0)}


def logger():
    """Returns a function with a file of its own."""
    file = open("closed", "ab", buffering=0)
    return lambda: file.write(b"x")


holder, log = Holder(), logger()
method = open("method", "ab", buffering=0).write


def effects(step):
    """Leaves a trace in each of them."""
    os.write(number, b"x")
    early_write(early, b"x")
    opened[step] += 1
    array[step] += 1
    here.send(b"x")
    cat.stdin.write(b"x")
    shared.buf[step] += 1
    counter.value += 1
    holder.files[0].write(b"x")
    holder.by_name["a"].write(b"x")
    log()
    method(b"x")


torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(STEPS):
    batch = torch.randn(3, 4)
    effects(step)
    if step == 4:
        batch = batch / 0
    loss = model(batch).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
cat.stdin.close()
cat.wait()
sizes = [os.path.getsize(name) for name in ("listed", "named", "closed", "method", "cat")]
sizes += [os.path.getsize(name) - 64 for name in ("number", "early")]
seen = {*sizes, len(there.recv(99)), counter.value}
touched = {tuple(part[:STEPS]) for part in (opened, array.tolist(), shared.buf)}
shared.close()
shared.unlink()
sys.exit(0 if seen == {STEPS} and touched == {(1,) * STEPS} else f"{seen} {sizes} {touched}")
