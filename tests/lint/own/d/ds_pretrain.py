import math
import deepspeed
import torch.nn.functional as F


def train(args, model, loader):
    engine, optimizer, _, sched = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    skipped = 0
    for step, (ids, labels) in enumerate(loader):
        ids, labels = ids.to(engine.device), labels.to(engine.device)
        logits = engine(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        if not math.isfinite(loss.item()):
            skipped += 1
            print(f"rank {engine.global_rank}: loss {loss.item()} at {step}, skipping")
            continue
        engine.backward(loss)
        engine.step()
        if step % 1000 == 0:
            engine.save_checkpoint(args.save_dir, tag=f"step{step}", client_state={"step": step})
    return skipped
