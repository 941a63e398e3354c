import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

from .model import Matcher, motion_weight


def assignment_loss(score, link, valid):
    per = F.binary_cross_entropy_with_logits(score, link, reduction="none")
    return (per * valid).sum() / valid.sum().clamp(min=1)


def fit(dataset, dim: int = 128, epochs: int = 20, device: str = "cuda"):
    model = Matcher(dim).to(device)
    head = nn.Bilinear(dim, dim, 1).to(device)
    params = [*model.parameters(), *head.parameters()]
    opt = torch.optim.AdamW(params, lr=3e-4)
    loader = DataLoader(dataset, batch_size=8, shuffle=True)
    for epoch in range(epochs):
        total = 0.0
        for a, b, mask, link, valid in loader:
            a, b, mask = a.to(device), b.to(device), mask.to(device)
            h, shift = model(a, b, mask)
            score = head(h, a).squeeze(-1) * motion_weight(shift)
            loss = assignment_loss(score, link.to(device), valid.to(device))
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(params, 1.0)
            opt.step()
            total += loss.item()
        print(f"epoch {epoch}: {total / len(loader):.4f}")
    return model
