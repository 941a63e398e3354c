"""Trains under a guard inside of a Trackio run of the user's, and prints what is stored."""

import json

import torch
import trackio
from trackio.sqlite_storage import SQLiteStorage

from nanguard import Guard

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
batches = [torch.randn(8, 4) for _ in range(8)]
batches[5][0] = float("nan")
trackio.init(project="theirs", name="mine", auto_log_gpu=False, auto_log_cpu=False)
with Guard(model, optimizer, trackers=["trackio"]) as guard:
    for step, x in guard.enumerate(batches):
        loss = (model(x) ** 2).mean()
        trackio.log({"loss": loss.item()}, step=step)
        guard.backward(loss)
        guard.step()
trackio.finish()
print(
    json.dumps(
        {
            "runs": SQLiteStorage.get_runs("theirs"),
            "logs": SQLiteStorage.get_logs("theirs", "mine"),
            "alerts": SQLiteStorage.get_alerts("theirs"),
        },
        default=str,
    )
)
