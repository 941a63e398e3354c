import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


@torch.no_grad()
def everyone_ok(loss: torch.Tensor) -> bool:
    flag = torch.isfinite(loss).to(torch.int32)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


class PatchEmbed(nn.Module):
    def __init__(self, img=224, patch=16, dim=384):
        super().__init__()
        self.proj = nn.Conv2d(3, dim, patch, patch)
        self.pos = nn.Parameter(torch.empty(1, (img // patch) ** 2, dim))
        nn.init.trunc_normal_(self.pos, std=0.02)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2) + self.pos


def train(net, loader, epochs, rank, lr=1e-3, accum=2):
    model = DDP(net.cuda(rank), device_ids=[rank])
    opt = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05)
    scaler = torch.amp.GradScaler("cuda")
    skipped = 0
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        for i, (img, y) in enumerate(loader):
            img, y = img.cuda(rank, non_blocking=True), y.cuda(rank, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(model(img), y, label_smoothing=0.1) / accum
            if not everyone_ok(loss):
                skipped += 1
                opt.zero_grad(set_to_none=True)
                continue
            scaler.scale(loss).backward()
            if (i + 1) % accum:
                continue
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=2.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad(set_to_none=True)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item() * accum:.4f}, {skipped} skipped on all ranks")
