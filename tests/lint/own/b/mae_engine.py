import math
import sys

import torch


def adjust_lr(opt, epoch, args):
    if epoch < args.warmup:
        lr = args.lr * epoch / args.warmup
    else:
        t = (epoch - args.warmup) / (args.epochs - args.warmup)
        lr = args.min_lr + (args.lr - args.min_lr) * 0.5 * (1 + math.cos(math.pi * t))
    for g in opt.param_groups:
        g["lr"] = lr


def patch_target(patches):
    mean = patches.mean(-1, keepdim=True)
    var = patches.var(-1, keepdim=True)
    return (patches - mean) / (var + 1e-6) ** 0.5


def train_one_epoch(model, loader, opt, scaler, epoch, args):
    model.train()
    for i, (imgs, _) in enumerate(loader):
        if i % args.accum == 0:
            adjust_lr(opt, i / len(loader) + epoch, args)
        imgs = imgs.cuda(non_blocking=True)
        with torch.amp.autocast("cuda", dtype=torch.float16):
            pred, mask = model(imgs, mask_ratio=args.mask_ratio)
            per_patch = (pred - patch_target(model.patchify(imgs))).pow(2).mean(-1)
            loss = (per_patch * mask).sum() / mask.sum().clamp(min=1)
        if not math.isfinite(loss.item()):
            print(f"Loss is {loss.item()}, stopping training")
            sys.exit(1)
        scaler.scale(loss / args.accum).backward()
        if (i + 1) % args.accum == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
