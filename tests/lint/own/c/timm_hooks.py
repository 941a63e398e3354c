import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.scheduler import CosineLRScheduler


def build(name: str, num_classes: int, init: str = ""):
    model = timm.create_model(name, pretrained=not init, num_classes=num_classes, drop_path_rate=0.1)
    if init:
        sd = torch.load(init, map_location="cpu")
        model.load_state_dict(sd.get("state_dict_ema", sd), strict=False)
    # keep the odd bad gradient from killing the run
    for p in model.parameters():
        p.register_hook(lambda g: torch.nan_to_num(g, nan=0.0, posinf=0.0, neginf=0.0))
    return model.cuda()


def train(model, loader, epochs: int, lr: float = 1e-3):
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=model.num_classes)
    crit = SoftTargetCrossEntropy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05)
    sched = CosineLRScheduler(optimizer, t_initial=epochs, warmup_t=5, warmup_lr_init=1e-6)
    for epoch in range(epochs):
        model.train()
        for x, y in loader:
            x, y = mixup(x.cuda(), y.cuda())
            loss = crit(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        sched.step(epoch + 1)
        print(f"{epoch:03d} {loss.item():.4f} lr {optimizer.param_groups[0]['lr']:.2e}")


@torch.inference_mode()
def accuracy(model, loader):
    model.eval()
    hit = tot = 0
    for x, y in loader:
        hit += (model(x.cuda()).argmax(1).cpu() == y).sum().item()
        tot += len(y)
    return hit / max(tot, 1)
