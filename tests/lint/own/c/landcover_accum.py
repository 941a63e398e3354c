import segmentation_models_pytorch as smp
import torch
from torch.amp import GradScaler, autocast
from tqdm import tqdm

ACCUM = 4
N_CLASSES = 11

model = smp.Unet("efficientnet-b4", in_channels=6, classes=N_CLASSES).cuda()
params = [p for p in model.parameters() if p.requires_grad]
opt = torch.optim.AdamW(params, lr=3e-4)
scaler = GradScaler("cuda")
ce = torch.nn.CrossEntropyLoss(ignore_index=255)
torch.autograd.set_detect_anomaly(True)


def epoch(loader):
    model.train()
    running = 0.0
    opt.zero_grad(set_to_none=True)
    for i, (tile, label) in enumerate(tqdm(loader)):
        with autocast("cuda", dtype=torch.float16):
            out = model(tile.cuda(non_blocking=True))
            loss = ce(out, label.cuda(non_blocking=True).long()) / ACCUM
        scaler.scale(loss).backward()
        running += loss.item() * ACCUM
        if (i + 1) % ACCUM == 0:
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad(set_to_none=True)
    return running / len(loader)


@torch.no_grad()
def miou(loader):
    inter = torch.zeros(N_CLASSES)
    union = torch.zeros(N_CLASSES)
    for tile, label in loader:
        pred = model(tile.cuda()).argmax(1).cpu()
        for c in range(N_CLASSES):
            inter[c] += ((pred == c) & (label == c)).sum()
            union[c] += ((pred == c) | (label == c)).sum()
    return (inter / union.clamp(min=1)).mean().item()
