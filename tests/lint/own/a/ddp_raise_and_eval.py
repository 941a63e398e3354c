import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
import torch.nn.functional as F


def setup():
    dist.init_process_group("nccl")
    torch.autograd.set_detect_anomaly(False)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


class MaskedAE(nn.Module):
    def __init__(self, enc, dec, ratio=0.75):
        super().__init__()
        self.enc, self.dec, self.ratio = enc, dec, ratio

    def forward(self, patches):
        b, n, d = patches.shape
        keep = int(n * (1 - self.ratio))
        order = torch.rand(b, n, device=patches.device).argsort(1)
        hidden = torch.ones(b, n, device=patches.device).scatter(1, order[:, :keep], 0.0)
        mean, var = patches.mean(-1, keepdim=True), patches.var(-1, keepdim=True)
        target = (patches - mean) / (var + 1e-6) ** 0.5
        err = (self.dec(self.enc(patches, order[:, :keep])) - target).pow(2).mean(-1)
        return (err * hidden).sum() / (b * (n - keep))


def train(model, loader, epochs, lr):
    setup()
    model = DDP(model.cuda())
    opt = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        for step, x in enumerate(loader):
            loss = model(x.cuda(non_blocking=True))
            if not torch.isfinite(loss):
                raise FloatingPointError(f"rank {dist.get_rank()} epoch {epoch} step {step}: {loss.item()}")
            opt.zero_grad(set_to_none=True)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            if not torch.isfinite(norm):  # gradients are already averaged: every rank sees the same norm
                continue
            opt.step()


@torch.no_grad()
def knn_eval(feats, labels, queries, k=20, tau=0.07):
    sim = F.normalize(queries, dim=-1) @ F.normalize(feats, dim=-1).T
    val, idx = sim.topk(k, dim=-1)
    votes = torch.zeros(len(queries), int(labels.max()) + 1, device=feats.device)
    votes.scatter_add_(1, labels[idx], (val / tau).exp())
    return votes.argmax(-1)
