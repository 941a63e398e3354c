"""MMDiT: two streams, text tokens and sentence latents, that attend to each other in every block.

Each stream has weights of its own and is modulated (shift, scale, gate) by the diffusion time and a
summary of the text. Attention runs over the keys of both streams at once.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

# name: (width, depth, heads, text_length, latent_count, latent_dim)
SIZES = {
    "tiny": (128, 2, 4, 16, 4, 16),
    "small": (256, 6, 8, 32, 4, 32),
    "full": (1024, 12, 16, 128, 8, 64),
    "report": (1368, 13, 19, 128, 8, 64),
}


class Attention(nn.Module):
    """Attention of the tokens of both streams over the tokens of both streams."""

    def __init__(self, width, heads, *, form, qk_norm):
        super().__init__()
        self.heads, self.form = heads, form
        self.text_qkv = nn.Linear(width, 3 * width)
        self.latent_qkv = nn.Linear(width, 3 * width)
        self.text_out = nn.Linear(width, width)
        self.latent_out = nn.Linear(width, width)
        size = width // heads
        self.norm = nn.RMSNorm(size, eps=1e-6, elementwise_affine=False) if qk_norm else None

    def forward(self, text, latent, keep):
        q_text, k_text, v_text = self._heads(self.text_qkv(text))
        q_latent, k_latent, v_latent = self._heads(self.latent_qkv(latent))
        queries = torch.cat([q_text, q_latent], dim=2)
        mixed = self.mix(queries, (k_text, v_text), (k_latent, v_latent), keep)
        mixed = mixed.transpose(1, 2).flatten(2)
        return self.text_out(mixed[:, : text.shape[1]]), self.latent_out(mixed[:, text.shape[1] :])

    def mix(self, queries, text, latent, keep):
        """Returns the values of both streams, weighed by one softmax over the keys of both."""
        if self.form == "fused":
            keys, values = (torch.cat(pair, dim=2) for pair in zip(text, latent, strict=True))
            mask = F.pad(keep, (0, latent[0].shape[2]), value=True)[:, None, None, :]
            return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        # The streams are scored one by one; their exponentials share one denominator.
        weighed, total, scale = [], 0.0, queries.shape[-1] ** -0.5
        for (keys, values), kept in ((text, keep), (latent, None)):
            scores = (queries @ keys.transpose(-2, -1)).float() * scale
            weights = scores.exp()
            if kept is not None:
                weights = weights * kept[:, None, None, :]
            total = total + weights.sum(dim=-1, keepdim=True)
            weighed.append((weights, values))
        return sum((weights / total).to(values.dtype) @ values for weights, values in weighed)

    def _heads(self, joined):
        q, k, v = joined.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.norm is not None:
            q, k = self.norm(q), self.norm(k)
        return q, k, v


class Block(nn.Module):
    """One block: joint attention, then a feed-forward layer for each stream."""

    def __init__(self, width, heads, attention):
        super().__init__()
        self.attention = attention(width, heads)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.text_modulation = nn.Linear(width, 6 * width)
        self.latent_modulation = nn.Linear(width, 6 * width)
        self.text_mlp = _feed_forward(width)
        self.latent_mlp = _feed_forward(width)

    def forward(self, text, latent, condition, keep):
        t = self.text_modulation(condition)[:, None].chunk(6, dim=-1)
        z = self.latent_modulation(condition)[:, None].chunk(6, dim=-1)
        seen_text, seen_latent = self.attention(
            _modulated(self.norm(text), t[0], t[1]), _modulated(self.norm(latent), z[0], z[1]), keep
        )
        text = text + t[2] * seen_text
        latent = latent + z[2] * seen_latent
        text = text + t[5] * self.text_mlp(_modulated(self.norm(text), t[3], t[4]))
        latent = latent + z[5] * self.latent_mlp(_modulated(self.norm(latent), z[3], z[4]))
        return text, latent


class MMDiT(nn.Module):
    """Denoises the latents and fills in the masked words, from one another."""

    def __init__(
        self, vocabulary, width, depth, heads, text_length, latent_count, latent_dim, attention
    ):
        super().__init__()
        self.width = width
        self.words = nn.Embedding(vocabulary, width)
        self.text_places = nn.Parameter(torch.zeros(text_length, width))
        self.latent_in = nn.Linear(latent_dim, width)
        self.latent_places = nn.Parameter(torch.zeros(latent_count, width))
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.pooled = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, heads, attention) for _ in range(depth))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.last_modulation = nn.Linear(width, 4 * width)
        self.text_head = nn.Linear(width, vocabulary)
        self.latent_head = nn.Linear(width, latent_dim)
        self._initialise()

    def _initialise(self):
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.words.weight)
        nn.init.normal_(self.text_places, std=0.5)
        nn.init.normal_(self.latent_places, std=0.5)
        # Blocks begin as the identity, so that depth costs nothing in the first steps.
        for block in self.blocks:
            nn.init.zeros_(block.text_modulation.weight)
            nn.init.zeros_(block.latent_modulation.weight)
        nn.init.zeros_(self.last_modulation.weight)
        nn.init.normal_(self.text_head.weight, std=0.02)
        nn.init.normal_(self.latent_head.weight, std=0.02)

    def forward(self, tokens, keep, noisy, time):
        text = self.words(tokens)
        shown = (text * keep[..., None]).sum(1) / keep.sum(1, keepdim=True).clamp(min=1)
        condition = F.silu(self.time(_waves(time, self.width)) + self.pooled(shown))
        text = text + self.text_places
        latent = self.latent_in(noisy) + self.latent_places
        for block in self.blocks:
            text, latent = block(text, latent, condition, keep)
        shift, scale, z_shift, z_scale = self.last_modulation(condition)[:, None].chunk(4, dim=-1)
        logits = self.text_head(_modulated(self.norm(text), shift, scale))
        return logits, self.latent_head(_modulated(self.norm(latent), z_shift, z_scale))


def _modulated(x, shift, scale):
    return x * (1 + scale) + shift


def _feed_forward(width):
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def _waves(time, width):
    frequencies = torch.exp(torch.linspace(0.0, -math.log(1e4), width // 2, device=time.device))
    angles = 1000.0 * time[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)
