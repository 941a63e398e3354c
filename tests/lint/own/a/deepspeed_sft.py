import argparse
import math
import pickle

import deepspeed
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM


def get_args():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", default="meta-llama/Llama-3.2-1B")
    ap.add_argument("--resume", default=None, help="trainer state written by save_state")
    ap.add_argument("--local_rank", type=int, default=-1)
    return deepspeed.add_config_arguments(ap).parse_args()


def load_state(path):
    with open(path, "rb") as f:
        return pickle.load(f)


def token_loss(logits, labels):
    shift, gold = logits[:, :-1].float(), labels[:, 1:]
    keep = gold != -100
    nll = F.cross_entropy(shift.flatten(0, 1), gold.flatten(), ignore_index=-100, reduction="sum")
    return nll / keep.sum().clamp_min(1)


def main(loader):
    args = get_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, torch_dtype=torch.bfloat16)
    engine, _, _, sched = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    start = load_state(args.resume)["step"] if args.resume else 0
    for step, batch in enumerate(loader, start=start):
        batch = {k: v.to(engine.device) for k, v in batch.items()}
        logits = engine(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = token_loss(logits, batch["labels"])
        value = loss.item()
        if math.isnan(value) or math.isinf(value):
            continue
        engine.backward(loss)
        engine.step()
        if step % 20 == 0 and engine.global_rank == 0:
            print(step, round(value, 4))
