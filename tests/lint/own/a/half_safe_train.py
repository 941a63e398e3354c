import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Norm16(nn.Module):
    def __init__(self, d: int):
        super().__init__()
        self.w = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-8)
        return h.to(x.dtype) * self.w


class Attn16(nn.Module):
    def __init__(self, d: int, heads: int):
        super().__init__()
        self.h, self.hd = heads, d // heads
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.h, self.hd).permute(2, 0, 3, 1, 4)
        s = (q * self.hd ** -0.5) @ k.mT
        s = s.masked_fill(pad[:, None, None], torch.finfo(s.dtype).min)
        return self.o((s.float().softmax(-1).to(v.dtype) @ v).transpose(1, 2).reshape(b, t, d))


def unit16(x: Tensor) -> Tensor:
    x = x.half()
    return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-3)


def train_fp16(net: nn.Module, loader, lr: float = 1e-4):
    net = net.half().cuda()
    opt = torch.optim.Adam(net.parameters(), lr=lr, eps=1e-4)
    for x, y in loader:
        loss = F.cross_entropy(net(x.cuda().half()).float(), y.cuda())
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()


def train_bf16(net: nn.Module, loader, lr: float = 1e-4):
    net = net.to(device="cuda", dtype=torch.bfloat16)
    opt = torch.optim.AdamW(net.parameters(), lr=lr)
    for x, y in loader:
        logits = net(x.cuda().bfloat16())
        loss = F.cross_entropy(logits.masked_fill(y.lt(0)[:, None].cuda(), -1e9).float(), y.cuda(), ignore_index=-1)
        opt.zero_grad()
        loss.backward()
        opt.step()


def finetune_sgd(net: nn.Module):
    return torch.optim.SGD(net.half().parameters(), lr=1e-2, momentum=0.9)
