import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import torch.nn.functional as F

from .dist_utils import all_finite, finish, mean_across


def velocity(x):
    return x[:, 1:] - x[:, :-1]


def motion_loss(pred, gt, lens):
    t = torch.arange(pred.size(1), device=pred.device)
    mask = (t[None] < lens[:, None]).float().unsqueeze(-1)
    pos = ((pred - gt).abs() * mask).sum() / mask.expand_as(pred).sum()
    vel = F.l1_loss(velocity(pred), velocity(gt))
    return pos + 0.5 * vel


def foot_speed(x, feet):
    v = velocity(x[:, :, feet])
    return (v * v).sum(-1).sqrt()


def train(model, loader, rank, epochs=200, resume=None):
    model = DistributedDataParallel(model.cuda(rank), device_ids=[rank])
    params = [p for p in model.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(params, lr=2e-4)
    scaler = torch.amp.GradScaler("cuda")
    if resume:
        model.module.load_state_dict(torch.load(resume, map_location=f"cuda:{rank}", weights_only=False))
    for epoch in range(epochs):
        for gt, lens, feet in loader:
            gt, lens = gt.cuda(rank), lens.cuda(rank)
            with torch.autocast("cuda", dtype=torch.float16):
                pred = model(gt, lens)
            loss = motion_loss(pred.float(), gt, lens) + 0.1 * foot_speed(pred.float(), feet).mean()
            if not all_finite(loss):
                opt.zero_grad(set_to_none=True)
                continue
            scaler.scale(loss).backward()
            norm = finish(scaler, opt, params, 1.0)
        shown = mean_across(loss)
        if rank == 0:
            print(f"epoch {epoch}: {shown.item():.4f} |g|={norm.item():.3f}")
