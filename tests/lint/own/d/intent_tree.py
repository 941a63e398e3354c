import torch
from torch import nn
import torch.nn.functional as F


class TreeHead(nn.Module):
    """The leaf is chosen among the children of the parent."""

    def __init__(self, d: int, leaves: int, children: torch.Tensor):
        super().__init__()
        self.fc = nn.Linear(d, leaves)
        self.register_buffer("children", children.bool())

    def loss(self, h, parent, leaf):
        logits = self.fc(h)
        logits = torch.where(self.children[parent], logits, torch.tensor(float("-inf"), device=h.device))
        logp = F.log_softmax(logits, dim=-1)
        return F.nll_loss(logp, leaf)

    def loss_soft(self, h, parent, leaf):
        logits = self.fc(h).masked_fill(~self.children[parent], -1e4)
        return F.cross_entropy(logits, leaf)

    @torch.no_grad()
    def predict(self, h, parent):
        logits = self.fc(h).masked_fill(~self.children[parent], float("-inf"))
        return logits.softmax(-1).max(-1)


def run(encoder, head, loader, opt, n_leaves):
    for x, parent, leaf in loader:
        leaf = leaf.clamp_(0, n_leaves - 1)
        loss = head.loss(encoder(x), parent, leaf)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
        opt.step()
