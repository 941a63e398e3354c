import json
import time
import torch
import torch.nn.functional as F


class Meter:
    def __init__(self, path):
        self.f = open(path, "a", encoding="utf-8")

    def write(self, **kw):
        self.f.write(json.dumps(kw) + "\n")
        self.f.flush()


def train(model, batches, optimizer, scheduler, meter, device, max_steps=50_000):
    model.train()
    t0 = time.time()
    for step in range(max_steps):
        ids = next(batches).to(device)
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss = torch.nan_to_num(loss, nan=0.0, posinf=10.0)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        # keep the norm for the log, do not clip
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        optimizer.step()
        scheduler.step()
        if step % 20 == 0:
            meter.write(step=step, loss=loss.item(), norm=norm.item(), sec=time.time() - t0)
