import torch
from torch import nn
import torch.nn.functional as F


class ConstrainedTagger(nn.Module):
    """BIO tagger: an I- tag is allowed only after its own B- or I- tag."""

    def __init__(self, encoder: nn.Module, d: int, n_tags: int, allowed: torch.Tensor):
        super().__init__()
        self.encoder, self.n_tags = encoder, n_tags
        self.fc = nn.Linear(d, n_tags)
        self.register_buffer("allowed", allowed.bool())

    def forward(self, ids, mask, tags=None):
        logits = self.fc(self.encoder(ids, mask))
        if tags is None:
            return logits
        prev = F.pad(tags, (1, 0))[:, :-1]
        block = torch.zeros_like(logits).masked_fill(~self.allowed[prev], float("-inf"))
        logits = logits + block
        tags = torch.clamp(tags, min=0, max=self.n_tags - 1)
        loss = F.cross_entropy(logits.transpose(1, 2), tags, reduction="none")
        return (loss * mask).sum() / mask.sum().clamp(min=1)

    @torch.no_grad()
    def decode(self, ids, mask):
        logits = self(ids, mask)
        out = [logits[:, 0].argmax(-1)]
        for t in range(1, logits.size(1)):
            step = logits[:, t].masked_fill(~self.allowed[out[-1]], float("-inf"))
            out.append(step.argmax(-1))
        return torch.stack(out, 1)
