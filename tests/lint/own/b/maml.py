import torch
import torch.nn.functional as F
from torch.func import functional_call


def adapt(model, params, x, y, lr=0.4, steps=5):
    for _ in range(steps):
        loss = F.mse_loss(functional_call(model, params, (x,)), y)
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        params = {k: p - lr * g for (k, p), g in zip(params.items(), grads)}
    return params


class MAML:
    def __init__(self, model, meta_lr=1e-3, inner_lr=0.4):
        self.model, self.inner_lr = model, inner_lr
        self.opt = torch.optim.Adam(model.parameters(), lr=meta_lr)

    def outer_step(self, tasks):
        total = 0.0
        for xs, ys, xq, yq in tasks:
            fast = adapt(self.model, dict(self.model.named_parameters()), xs, ys, self.inner_lr)
            total = total + F.mse_loss(functional_call(self.model, fast, (xq,)), yq)
        total = total / len(tasks)
        self.opt.zero_grad()
        total.backward()
        for name, p in self.model.named_parameters():
            if p.grad is not None and torch.isnan(p.grad).any():
                print(f"nan gradient in {name}")
                p.grad.zero_()
        self.opt.step()
        return total.item()

    @torch.enable_grad()
    def evaluate(self, tasks):
        out = []
        for xs, ys, xq, yq in tasks:
            fast = adapt(self.model, dict(self.model.named_parameters()), xs, ys, self.inner_lr, steps=10)
            out.append(F.mse_loss(functional_call(self.model, fast, (xq,)), yq).item())
        return sum(out) / max(len(out), 1)
