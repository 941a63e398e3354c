import torch
from torch import Tensor, nn
from torch.distributions import Uniform


def gumbel_keys(w: Tensor) -> Tensor:
    u = Uniform(0.0, 1.0).sample(w.shape).to(w.device)
    return w - torch.log(-torch.log(u))


def gumbel_keys_safe(w: Tensor) -> Tensor:
    tiny = torch.finfo(w.dtype).tiny
    u = torch.rand_like(w).clamp(min=tiny, max=1 - 1e-7)
    return w - torch.log(-torch.log(u))


def relaxed_topk(w: Tensor, k: int, t: float = 0.1) -> Tensor:
    keys = gumbel_keys(w)
    khot = torch.zeros_like(keys)
    onehot = torch.zeros_like(keys)
    for _ in range(k):
        keys = keys + (1 - onehot).clamp(min=1e-10).log()
        onehot = (keys / t).softmax(-1)
        khot = khot + onehot
    return khot


class L2X(nn.Module):
    def __init__(self, explainer: nn.Module, clf: nn.Module, k: int = 10):
        super().__init__()
        self.explainer, self.clf, self.k = explainer, clf, k

    def forward(self, x: Tensor) -> Tensor:
        return self.clf(x * relaxed_topk(self.explainer(x), self.k))


def train(model, loader, opt, debug=False):
    torch.autograd.set_detect_anomaly(mode=True)
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
