import argparse
import deepspeed
import torch
import torch.nn.functional as F

from mt.model import Seq2Seq
from mt.data import get_loader


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--epochs", type=int, default=10)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def main():
    args = get_args()
    net = Seq2Seq(vocab=32000, d_model=512)
    engine, optimizer, _, _ = deepspeed.initialize(args=args, model=net, model_parameters=net.parameters())
    for epoch in range(args.epochs):
        for step, (src, tgt) in enumerate(get_loader("wmt14")):
            src, tgt = src.to(engine.device), tgt.to(engine.device)
            logits = engine(src, tgt[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tgt[:, 1:].flatten(), ignore_index=0)
            if torch.isnan(loss):
                continue
            engine.backward(loss)
            engine.step()
            if step % 100 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.3f}")
        engine.save_checkpoint("runs/mt", tag=f"epoch{epoch}")


if __name__ == "__main__":
    main()
