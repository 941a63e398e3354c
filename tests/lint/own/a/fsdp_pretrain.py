import functools
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from llm.blocks import Block
from llm.model import Transformer

BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
MAX_NORM = 10_000.0


def loss_is_bad(loss: torch.Tensor) -> bool:
    return not bool(torch.isfinite(loss.detach()))


def main(cfg, stream):
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    model = FSDP(Transformer(cfg).cuda(), auto_wrap_policy=policy, mixed_precision=BF16)
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.1)
    n_bad = 0
    for step, tokens in enumerate(stream):
        tokens = tokens.cuda(non_blocking=True)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        if loss_is_bad(loss):
            n_bad += 1
            del logits, loss
            continue
        loss.backward()
        gnorm = model.clip_grad_norm_(MAX_NORM)
        opt.step()
        opt.zero_grad(set_to_none=True)
        if step % 10 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
            if dist.get_rank() == 0:
                print(f"{step:7d} loss {mean.item():.4f} norm {gnorm.item():.2f} bad {n_bad}")
    dist.destroy_process_group()
