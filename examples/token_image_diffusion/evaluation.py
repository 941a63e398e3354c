"""Measures how much of a text comes back out of its noisy image."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from codec import to_ids, to_pixels
from diffusion import SCHEDULES, add_noise, clean_from_noise

if TYPE_CHECKING:
    from data import Texts
    from settings import Settings
    from torch import nn

# Which share of the diffusion time the images are taken at.
TIMES = (0.02, 0.1, 0.3)


@torch.no_grad()
def exact_match(
    model: nn.Module, texts: Texts, settings: Settings, device: torch.device, count: int = 64
) -> dict[str, float]:
    """Returns the share of tokens that are decoded exactly, and that are the nearest word.

    Args:
        model: The model, or its average.
        texts: The data set.
        settings: The run's settings.
        device: Where to compute.
        count: How many texts to look at.
    """
    images, mask = texts.images[:count].to(device), texts.masks[:count].to(device)
    ids = texts.ids[:count].to(device)
    known = torch.tensor(sorted(texts.tokenizer.ids.values()), device=device)
    colours = to_pixels(known, settings["codec.vocab_size"])
    alphas = SCHEDULES[settings["diffusion.schedule"]](settings["diffusion.timesteps"])
    draw = torch.Generator().manual_seed(settings["seed"])
    found: dict[str, float] = {}
    model.eval()
    for time in TIMES:
        index = int(time * (len(alphas) - 1))
        alpha = alphas[index].to(device)
        noisy = add_noise(images, torch.randn(images.shape, generator=draw).to(device), alpha)
        t = torch.full((len(images),), time, device=device)
        clean = model(noisy, t, mask).float()
        if settings["diffusion.prediction"] == "eps":
            clean = clean_from_noise(noisy, clean, alpha)
        nearest = known[torch.cdist(clean.flatten(0, 1), colours).argmin(-1)].view_as(ids)
        good = clean.isfinite().all(-1)  # a NaN has a nearest colour, too
        found[f"exact@{time}"] = float((good & (to_ids(clean) == ids))[mask].float().mean())
        found[f"nearest@{time}"] = float((good & (nearest == ids))[mask].float().mean())
    model.train()
    return found
