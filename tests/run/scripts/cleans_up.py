"""Removes what an earlier run has left, in every way, before torch is imported."""

import ctypes
import os
import shutil
import subprocess
from os import remove
from pathlib import Path

out = Path("out")
if out.exists():
    for old in out.glob("*.pt"):
        remove(old)  # noqa: PTH107 - an early-bound name
    shutil.rmtree(out / "logs", ignore_errors=True)
    ctypes.CDLL(None).unlink(b"out/native.bin")
    os.system("rm -f out/shell.txt")
    subprocess.run(["sh", "-c", "echo x > out/spawned.txt"], check=False)
out.mkdir(exist_ok=True)
(out / "logs").mkdir(exist_ok=True)
with open("out/logs/log.txt", "w") as log:  # noqa: PTH123
    log.write("began\n")
for name in ("native.bin", "shell.txt"):
    (out / name).write_text("kept")

import torch  # noqa: E402
from torch import nn  # noqa: E402

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    x = torch.randn(8, 4)
    loss = (model(x) ** 2).mean()
    if step == 5:
        loss = loss / (loss * 0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch.save(model.state_dict(), f"out/{step}.pt")
print("done")
