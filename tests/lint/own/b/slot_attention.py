import torch
import torch.nn.functional as F
from torch import nn


class SlotAttention(nn.Module):
    def __init__(self, n_slots: int, dim: int, iters: int = 3, eps: float = 1e-8):
        super().__init__()
        self.n, self.iters, self.eps = n_slots, iters, eps
        self.scale = dim ** -0.5
        self.mu = nn.Parameter(torch.randn(1, 1, dim))
        self.log_sigma = nn.Parameter(torch.empty(1, 1, dim))
        nn.init.xavier_uniform_(self.log_sigma)
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.gru = nn.GRUCell(dim, dim)
        self.norm_in, self.norm_slots = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x):
        b, _, d = x.shape
        x = self.norm_in(x)
        k, v = self.k(x), self.v(x)
        sigma = self.log_sigma.clamp(-5.0, 2.0).exp()
        slots = self.mu + sigma * torch.randn(b, self.n, d, device=x.device)
        for _ in range(self.iters):
            prev = slots
            q = self.q(self.norm_slots(slots))
            att = (torch.einsum("bid,bjd->bij", q, k) * self.scale).softmax(dim=1) + self.eps
            att = att / att.sum(dim=-1, keepdim=True)
            slots = self.gru((att @ v).reshape(-1, d), prev.reshape(-1, d)).view(b, self.n, d)
        return slots


def train(encoder, slots, decoder, loader, steps=500_000, lr=4e-4, warmup=10_000):
    params = [*encoder.parameters(), *slots.parameters(), *decoder.parameters()]
    opt = torch.optim.Adam(params, lr=lr)
    for step, img in zip(range(steps), loader):
        opt.param_groups[0]["lr"] = lr * min(1.0, step / warmup) * 0.5 ** (step / 100_000)
        rgb, alpha = decoder(slots(encoder(img)))
        recon = (rgb * alpha.softmax(1)).sum(1)
        loss = F.mse_loss(recon, img)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        opt.step()
        if step % 1000 == 0:
            print(step, torch.nan_to_num(loss.detach(), nan=-1.0).item())
