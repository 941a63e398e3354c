import torch
from torch import nn
import torch.nn.functional as F


class RoundSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g


def fake_quant_affine(w, bits=4):
    lo, hi = w.min(), w.max()
    unit = (w - lo) / (hi - lo)
    q = RoundSTE.apply(unit * (2 ** bits - 1)) / (2 ** bits - 1)
    return q * (hi - lo) + lo


def fake_quant_sym(x, bits=8):
    top = 2 ** (bits - 1) - 1
    scale = x.detach().abs().amax().clamp(min=1e-8) / top
    return RoundSTE.apply(x / scale).clamp(-top, top) * scale


class QLinear(nn.Linear):
    def forward(self, x):
        return F.linear(fake_quant_sym(x), fake_quant_affine(self.weight), self.bias)


def convert(module: nn.Module):
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            q = QLinear(child.in_features, child.out_features, child.bias is not None)
            q.load_state_dict(child.state_dict())
            setattr(module, name, q)
        else:
            convert(child)
    return module


def finetune(model, loader, epochs=3, lr=1e-5):
    model = convert(model).cuda()
    for p in model.parameters():
        p.register_hook(lambda g: torch.nan_to_num(g, nan=0.0, posinf=0.0, neginf=0.0))
    opt = torch.optim.AdamW(model.parameters(), lr=lr)
    for _ in range(epochs):
        for x, y in loader:
            loss = F.cross_entropy(model(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
    return model
