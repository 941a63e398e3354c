import torch
from torch.optim import Optimizer


class AdamP(Optimizer):
    """Adam with decoupled decay and a per-tensor trust ratio (LAMB style)."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
        if lr < 0.0:
            raise ValueError(f"bad lr {lr}")
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["t"] = 0
                    state["m"] = torch.zeros_like(p, dtype=torch.float32)
                    state["v"] = torch.zeros_like(p, dtype=torch.float32)
                state["t"] += 1
                g = p.grad.float()
                m, v = state["m"], state["v"]
                m.mul_(b1).add_(g, alpha=1 - b1)
                v.mul_(b2).addcmul_(g, g, value=1 - b2)
                c1, c2 = 1 - b1 ** state["t"], 1 - b2 ** state["t"]
                upd = (m / c1) / (v.sqrt() / c2 ** 0.5 + group["eps"])
                upd.add_(p.float(), alpha=group["weight_decay"])
                wn, un = p.norm(), upd.norm()
                trust = (wn / un).item() if wn > 0 and un > 0 else 1.0
                p.add_(upd.to(p.dtype), alpha=-group["lr"] * min(trust, 10.0))
        return loss


@torch.no_grad()
def ema_update(ema, model, decay):
    for a, b in zip(ema.parameters(), model.parameters()):
        a.lerp_(b, 1 - decay)


@torch.no_grad()
def global_norm(params):
    return torch.stack([p.grad.pow(2).sum() for p in params if p.grad is not None]).sum().sqrt()
