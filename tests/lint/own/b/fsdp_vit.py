import os
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from vit import Block, VisionTransformer


def setup():
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    return local


def build(local):
    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return FSDP(VisionTransformer(depth=32, dim=1280), auto_wrap_policy=policy, mixed_precision=bf16, device_id=local)


def train(loader, epochs=90):
    local = setup()
    model = build(local)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.3)
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        for it, (img, y) in enumerate(loader):
            loss = F.cross_entropy(model(img.cuda(local)).float(), y.cuda(local), label_smoothing=0.1)
            if torch.isnan(loss):
                print(f"rank {dist.get_rank()}: NaN loss at epoch {epoch} it {it}")
                continue
            opt.zero_grad(set_to_none=True)
            loss.backward()
            model.clip_grad_norm_(1.0)
            opt.step()
            if it % 100 == 0 and dist.get_rank() == 0:
                print(f"{epoch}:{it} {loss.item():.4f}")
    dist.destroy_process_group()
