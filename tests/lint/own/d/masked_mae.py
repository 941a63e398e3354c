import torch
from torch import nn
import torch.nn.functional as F


class MAE(nn.Module):
    def __init__(self, encoder, decoder, patch=16, ratio=0.75, d=768, dd=512):
        super().__init__()
        self.encoder, self.decoder, self.patch, self.ratio = encoder, decoder, patch, ratio
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dd))
        self.pos = nn.Parameter(torch.empty(1, 196, dd))
        self.embed = nn.Linear(d, dd)
        self.initialize_weights()

    def initialize_weights(self):
        nn.init.normal_(self.mask_token, std=0.02)
        nn.init.trunc_normal_(self.pos, std=0.02)
        self.apply(self._init)

    def _init(self, m):
        if isinstance(m, nn.Linear):
            nn.init.xavier_uniform_(m.weight)

    def patchify(self, img):
        return F.unfold(img, self.patch, stride=self.patch).transpose(1, 2)

    def random_keep(self, n, length, device):
        noise = torch.rand(n, length, device=device)
        order = noise.argsort(1)
        keep = order[:, : int(length * (1 - self.ratio))]
        mask = torch.ones(n, length, device=device).scatter(1, keep, 0.0)
        return keep, mask

    def forward(self, img):
        x = self.patchify(img)
        keep, mask = self.random_keep(x.size(0), x.size(1), x.device)
        h = self.embed(self.encoder(img, keep))
        full = self.mask_token.expand(x.size(0), x.size(1), -1).clone()
        full = full.scatter(1, keep.unsqueeze(-1).expand(-1, -1, h.size(-1)), h) + self.pos
        pred = self.decoder(full)
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True)
        target = (x - mean) / (var + 1e-6) ** 0.5
        loss = (pred - target).pow(2).mean(-1)
        return (loss * mask).sum() / mask.sum().clamp(min=1)
