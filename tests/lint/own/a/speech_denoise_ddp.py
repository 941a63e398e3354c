"""Multi-GPU training of the complex-mask speech denoiser."""
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def compress(mag, c=0.3):
    return mag ** c


def compress_db(mag):
    return 20.0 * torch.log10(mag.clamp(min=1e-5))


class DenoiserTrainer:
    def __init__(self, net: nn.Module, lr: float = 2e-4):
        dist.init_process_group("nccl")
        self.rank = int(os.environ["LOCAL_RANK"])
        self.net = DistributedDataParallel(net.cuda(self.rank), device_ids=[self.rank])
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=lr, weight_decay=1e-2)
        self.l1 = nn.L1Loss()

    def train_step(self, noisy, clean):
        est = self.net(noisy)
        loss = self.l1(compress(est.abs()), compress(clean.abs()))
        loss = loss + 0.1 * self.l1(compress_db(est.abs()), compress_db(clean.abs()))
        if not math.isfinite(loss.item()):
            print(f"[rank {self.rank}] non-finite loss, dropping this batch")
            return None
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 5.0)
        self.opt.step()
        return loss.item()

    def fit(self, loader, epochs):
        for epoch in range(epochs):
            loader.sampler.set_epoch(epoch)
            seen = [v for v in (self.train_step(*b) for b in loader) if v is not None]
            if self.rank == 0 and seen:
                print(f"epoch {epoch}: {sum(seen) / len(seen):.4f}")
