import torch
import torch.nn.functional as F


def entropy_min(logits):
    p = F.softmax(logits, dim=1)
    return -(p * p.log()).sum(1).mean()


def sharpen(logits, tau=0.5):
    return F.softmax(logits / tau, dim=1)


def pseudo_loss(weak, strong, threshold=0.95):
    with torch.no_grad():
        conf, label = weak.softmax(1).max(1)
        keep = (conf >= threshold).float()
    return (F.cross_entropy(strong, label, reduction="none") * keep).mean(), keep.mean()


class EMA:
    def __init__(self, model, decay=0.999):
        self.decay = decay
        self.shadow = {k: v.clone() for k, v in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model):
        for k, v in model.state_dict().items():
            if v.dtype.is_floating_point:
                self.shadow[k].lerp_(v, 1 - self.decay)
            else:
                self.shadow[k].copy_(v)


def train(model, labelled, unlabelled, opt, ema, w_u=1.0, w_e=0.1):
    model.train()
    for (x, y), (uw, us) in zip(labelled, unlabelled):
        out = model(torch.cat([x, uw, us]))
        lx, (lw, ls) = out[: len(x)], out[len(x):].chunk(2)
        loss_x = F.cross_entropy(lx, y)
        loss_u, rate = pseudo_loss(lw, ls)
        loss_e = entropy_min(ls)
        loss_e = torch.where(torch.isfinite(loss_e), loss_e, torch.zeros_like(loss_e))
        loss = loss_x + w_u * loss_u + w_e * loss_e
        if torch.isnan(loss):
            print("nan loss, skipping batch")
            continue
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema.update(model)
