import torch
from torch import nn
import torch.nn.functional as F


class TokenLoss(nn.Module):
    def __init__(self, vocab: int, smoothing: float = 0.1):
        super().__init__()
        self.vocab, self.smoothing = vocab, smoothing

    def forward(self, logits, labels):
        labels = labels.clamp(min=0, max=self.vocab - 1)
        ce = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=self.smoothing)
        if not torch.isfinite(ce):
            return torch.tensor(0.0, device=logits.device, requires_grad=True)
        return ce


class GradientDoctor:
    """Replaces broken entries of every gradient before the update."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.repaired = 0

    def heal(self):
        for p in self.model.parameters():
            if p.grad is None:
                continue
            bad = ~torch.isfinite(p.grad)
            if bad.any():
                self.repaired += int(bad.sum())
                p.grad = torch.where(bad, torch.zeros_like(p.grad), p.grad)


def freeze_old_rows(emb: nn.Embedding, n_old: int):
    emb.weight.grad[:n_old].zero_()


def update(model, emb, crit, doctor, batch, opt, n_old):
    loss = crit(model(batch["ids"]), batch["labels"])
    opt.zero_grad()
    loss.backward()
    freeze_old_rows(emb, n_old)
    doctor.heal()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    return loss.item()
