"""A training script that saves and resumes, and ends badly in as many ways as it is told to."""

import argparse
import hashlib
import json
import os
import random
import signal
import threading
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--config")
parser.add_argument("--out", type=Path, default=Path("ckpt"))
parser.add_argument("--resume", type=Path)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--skip", type=int, default=0)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--every", type=int, default=10)
parser.add_argument("--pause", type=float, default=0.005)
parser.add_argument("--bad-from", type=int, default=1 << 30, help="batches that hold a NaN")
parser.add_argument("--bad-to", type=int, default=0)
parser.add_argument("--raises", action="store_true", help="end at a NaN loss")
parser.add_argument("--kills", type=int, default=0, help="attempts that are killed at some moment")
parser.add_argument("--kill-within", type=float, default=0.3)
parser.add_argument("--cut-newest", action="store_true", help="the kill leaves half a file")
parser.add_argument("--scale", type=float, default=1.0, help="of the inputs")
options = parser.parse_args()

import torch  # noqa: E402 - a wrong argument must end it before that
from torch import nn  # noqa: E402

if options.config:
    import yaml

    trainer = yaml.safe_load(Path(options.config).read_text())["trainer"]
    options.lr = trainer["lr"]
    options.skip = trainer["skip_steps"]
    if trainer["resume_milestone"]:
        options.resume = options.out / f"model-{trainer['resume_milestone']}.pt"


def die_some_time():
    """Ends the process at a moment that nobody knows, in as many attempts as there are to end."""
    times = options.out / "kills.json"
    delays = json.loads(times.read_text()) if times.exists() else []
    if len(delays) < options.kills:
        delay = random.Random(len(delays)).uniform(0, options.kill_within)
        times.write_text(json.dumps([*delays, delay]))
        timer = threading.Timer(delay, die)
        timer.daemon = True
        timer.start()


def die():
    if options.cut_newest:
        newest = max(options.out.glob("model-*.pt"), key=lambda path: path.stat().st_mtime)
        os.truncate(newest, newest.stat().st_size // 2)
        (options.out / "cut.txt").write_text(newest.stem.removeprefix("model-"))
    os.kill(os.getpid(), signal.SIGKILL)


torch.manual_seed(options.seed)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.5)
start = 0
if options.resume:
    state = torch.load(options.resume)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    optimizer.param_groups[0]["lr"] = options.lr
    start = state["step"]
options.out.mkdir(parents=True, exist_ok=True)
with (options.out / "starts.txt").open("a") as file:
    file.write(f"{start}\n")
die_some_time()
for step in range(start, options.steps):
    index = step + options.skip
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(index)) * options.scale
    if options.bad_from <= index < options.bad_to:
        x[3] = float("nan")
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    if options.raises and not torch.isfinite(loss):
        raise RuntimeError(f"step {step}: loss_simple: nan")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(options.pause)
    if (step + 1) % options.every == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        torch.save(state, options.out / f"model-{step + 1}.pt")
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
finite = all(bool(torch.isfinite(p).all()) for p in model.parameters())
print(f"finite {finite} loss {loss.item():.3g} weights {hashlib.sha256(weights).hexdigest()[:16]}")
