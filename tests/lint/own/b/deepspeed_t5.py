import argparse
import json
import math

import deepspeed
import torch
from transformers import T5ForConditionalGeneration

from corpus import SpanCorruption


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--local_rank", type=int, default=-1)
    p.add_argument("--steps", type=int, default=50_000)
    p.add_argument("--data", required=True)
    p = deepspeed.add_config_arguments(p)
    return p.parse_args()


def train_step(engine, batch):
    batch = {k: v.to(engine.device) for k, v in batch.items()}
    loss = engine(**batch).loss
    if not math.isfinite(loss.item()):
        print(json.dumps({"event": "bad_loss", "rank": engine.global_rank, "step": engine.global_steps}))
        return None
    engine.backward(loss)
    engine.step()
    return loss.item()


def main():
    args = get_args()
    deepspeed.init_distributed()
    model = T5ForConditionalGeneration.from_pretrained("google/t5-v1_1-base")
    ds = SpanCorruption(args.data, mean_span=3.0)
    engine, _, loader, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters(), training_data=ds)
    _, state = engine.load_checkpoint("ckpt")
    done = state["step"] if state else 0
    for step, batch in zip(range(done, args.steps), loader):
        value = train_step(engine, batch)
        if engine.global_rank == 0 and step % 50 == 0 and value is not None:
            print(f"{step} {value:.4f} lr {engine.get_lr()[0]:.2e}")
        if step % 1000 == 0:
            engine.save_checkpoint("ckpt", client_state={"step": step})
