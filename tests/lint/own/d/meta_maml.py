import copy
import torch
from torch import nn
from torch.func import functional_call
import torch.nn.functional as F


class MAML:
    def __init__(self, net: nn.Module, inner_lr: float = 0.01, meta_lr: float = 1e-3, steps: int = 5):
        self.net, self.inner_lr, self.steps = net, inner_lr, steps
        self.opt = torch.optim.Adam(net.parameters(), lr=meta_lr)

    def adapt(self, x, y):
        fast = dict(self.net.named_parameters())
        for _ in range(self.steps):
            loss = F.cross_entropy(functional_call(self.net, fast, x), y)
            grads = torch.autograd.grad(loss, tuple(fast.values()), create_graph=True)
            fast = {k: p - self.inner_lr * g for (k, p), g in zip(fast.items(), grads)}
        return fast

    def meta_step(self, tasks):
        total = 0.0
        for xs, ys, xq, yq in tasks:
            fast = self.adapt(xs, ys)
            total = total + F.cross_entropy(functional_call(self.net, fast, xq), yq)
        loss = total / len(tasks)
        self.opt.zero_grad()
        loss.backward()
        for name, p in self.net.named_parameters():
            if p.grad is not None and torch.isnan(p.grad).any():
                print(f"nan gradient in {name}")
                p.grad = torch.zeros_like(p.grad)
        self.opt.step()
        return loss.item()

    def snapshot(self):
        return copy.deepcopy(self.net.state_dict())
