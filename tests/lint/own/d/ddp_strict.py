import math
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def reduce_mean(x: torch.Tensor) -> torch.Tensor:
    y = x.detach().clone()
    dist.all_reduce(y)
    return y / dist.get_world_size()


def train_one_epoch(model, criterion, loader, optimizer, device, epoch, clip=0.1):
    assert isinstance(model, DistributedDataParallel)
    model.train()
    for i, (images, targets) in enumerate(loader):
        images = images.to(device)
        targets = [{k: v.to(device) for k, v in t.items()} for t in targets]
        terms = criterion(model(images), targets)
        loss = sum(terms[k] * criterion.weight[k] for k in terms)
        shown = reduce_mean(loss).item()
        if not math.isfinite(shown):
            print(f"Loss is {shown}, stopping training", terms)
            sys.exit(1)
        optimizer.zero_grad()
        loss.backward()
        if clip > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if i % 10 == 0 and dist.get_rank() == 0:
            print(f"epoch {epoch} iter {i} loss {shown:.3f}")


def load_backbone(model, path):
    state = torch.load(path, map_location="cpu", weights_only=True)
    missing, unexpected = model.load_state_dict(state, strict=False)
    print(missing, unexpected)
