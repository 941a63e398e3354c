import argparse

import deepspeed
import torch
import torch.nn.functional as F

from modeling import build_decoder
from streams import token_stream


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--seq_len", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=50_000)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def main():
    args = get_args()
    deepspeed.init_distributed()
    net = build_decoder(args.seq_len)
    engine, _, _, _ = deepspeed.initialize(args=args, model=net, model_parameters=net.parameters())
    stream = token_stream(args.seq_len, engine.train_micro_batch_size_per_gpu())
    nan_count = 0
    for step in range(args.steps):
        tokens = next(stream).to(engine.device)
        logits = engine(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        if torch.isnan(loss):
            nan_count += 1
            continue
        engine.backward(loss)
        engine.step()
        if step % 100 == 0 and engine.global_rank == 0:
            print(f"step {step} loss {loss.item():.4f} nan batches {nan_count}")
        if step % 1000 == 0:
            engine.save_checkpoint("ckpts", tag=f"step{step}")


if __name__ == "__main__":
    main()
