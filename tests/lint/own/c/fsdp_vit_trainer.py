import functools
import math

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from vit import Block, ViT


class Trainer:
    def __init__(self, cfg, local_rank: int):
        self.cfg = cfg
        self.device = torch.device("cuda", local_rank)
        net = ViT(**cfg.vit)
        if cfg.pretrained:
            state = torch.load(cfg.pretrained, map_location="cpu")["model"]
            net.load_state_dict(state, strict=False)
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
        bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        self.model = FSDP(net, auto_wrap_policy=policy, mixed_precision=bf16, device_id=local_rank)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr, weight_decay=0.3)
        self.criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)

    def train_step(self, images, labels):
        images, labels = images.to(self.device), labels.to(self.device)
        self.optim.zero_grad(set_to_none=True)
        loss = self.criterion(self.model(images), labels)
        value = loss.item()
        if not math.isfinite(value):
            return None
        loss.backward()
        self.model.clip_grad_norm_(1.0)
        self.optim.step()
        return value

    def fit(self, loader):
        for epoch in range(self.cfg.epochs):
            loader.sampler.set_epoch(epoch)
            for i, (images, labels) in enumerate(loader):
                v = self.train_step(images, labels)
                if v is not None and i % 100 == 0 and dist.get_rank() == 0:
                    print(f"[{epoch}/{i}] {v:.3f}")
