"""Writes, within its steps, to whatever was opened before."""

import csv
import multiprocessing
import queue
import socket
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from sys import stdout

import numpy as np
from common import Net, batches, digest, torch
from tqdm import tqdm

log = Path("log.txt").open("w")  # noqa: SIM115
rows = csv.DictWriter(Path("rows.csv").open("w", newline=""), ["step", "loss"])  # noqa: SIM115
rows.writeheader()
database = sqlite3.connect("runs.db")
database.execute("create table losses (step integer)")
curve = np.memmap("curve.dat", dtype="float32", mode="w+", shape=(40,))
here, there = socket.socketpair()
sender, receiver = multiprocessing.Pipe()
simple = queue.SimpleQueue()
pool = ThreadPoolExecutor(1)
source = Path("names.txt")
source.write_text("\n".join(f"name {n}" for n in range(100)))


class Trainer:
    def __init__(self):
        self.model = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.bar = tqdm(total=12, disable=True)
        self.file = Path("trainer.log").open("w")  # noqa: SIM115
        self.names = source.open()
        self.numbers = (n * n for n in range(1000))
        self.order = iter([f"item {n}" for n in range(100)])
        self.done = []

    def step(self, number, x, y):
        name = self.names.readline().strip()
        self.file.write(f"{number} {name} {next(self.numbers)}\n")
        self.bar.update(1)
        next(self.order)
        loss = ((self.model(x) - y) ** 2).mean()
        log.write(f"{number} {float(loss.detach()):.4f}\n")
        rows.writerow({"step": number, "loss": 1})
        database.execute("insert into losses values (?)", (number,))
        curve[number] = 1.0
        here.sendall(b"x")
        sender.send(number)
        simple.put(number)
        pool.submit(self.done.append, number)
        stdout.write(f"step {number}\n")
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def main():
    torch.manual_seed(0)
    trainer = Trainer()
    for number, (x, y) in enumerate(batches()):
        trainer.step(number, x, y)
    pool.shutdown()
    for one in (log, trainer.file):
        one.close()
    database.commit()
    pending = 0
    while receiver.poll():
        receiver.recv()
        pending += 1
    print("bar", trainer.bar.n, "socket", len(there.recv(4096)), "pipe", pending)
    print("queue", simple.qsize(), "pool", len(trainer.done), "next", trainer.names.readline())
    print("rows", database.execute("select count(*) from losses").fetchone())
    curve.flush()
    print(next(trainer.order), next(trainer.numbers), digest(trainer.model))


if __name__ == "__main__":
    main()
