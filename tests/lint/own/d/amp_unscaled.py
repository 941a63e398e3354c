import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast


def param_norm(params) -> float:
    with torch.no_grad():
        return torch.sqrt(sum(p.pow(2).sum() for p in params)).item()


def train(model, disc, loader, opt_g, opt_d, device="cuda"):
    scaler = GradScaler(init_scale=2.0 ** 12)
    bce = nn.BCEWithLogitsLoss()
    for step, (x, y) in enumerate(loader):
        x, y = x.to(device), y.to(device)
        with autocast():
            fake = model(x)
            real_out, fake_out = disc(y), disc(fake.detach())
            d_loss = bce(real_out, torch.ones_like(real_out)) + bce(fake_out, torch.zeros_like(fake_out))
        opt_d.zero_grad(set_to_none=True)
        scaler.scale(d_loss).backward()
        scaler.unscale_(opt_d)
        nn.utils.clip_grad_norm_(disc.parameters(), 1.0)
        scaler.step(opt_d)

        with autocast():
            out = disc(fake)
            g_loss = bce(out, torch.ones_like(out)) + 100 * nn.functional.l1_loss(fake, y)
        opt_g.zero_grad(set_to_none=True)
        scaler.scale(g_loss).backward()
        scaler.unscale_(opt_g)
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        scaler.step(opt_g)
        scaler.update()
        if step % 100 == 0:
            prob = torch.sigmoid(real_out.detach()).mean().item()
            print(f"{step} D {d_loss.item():.3f} G {g_loss.item():.3f} D(x)={prob:.2f} |w|={param_norm(model.parameters()):.1f}")
