import torch
from torch import nn
import torch.nn.functional as F


class MultiTask(nn.Module):
    """One head for several hospitals; each hospital annotates a subset of findings."""

    def __init__(self, backbone: nn.Module, width: int, findings: int, table: torch.Tensor):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(width, findings)
        self.register_buffer("table", table.bool())

    def forward(self, x, site):
        logits = self.head(self.backbone(x))
        return logits.masked_fill(~self.table[site], float("-inf"))


def train(model, loader, opt, device):
    model.train()
    for step, (x, site, y) in enumerate(loader):
        logits = model(x.to(device), site.to(device))
        loss = F.cross_entropy(logits, y.to(device))
        opt.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        if torch.isnan(norm).any():
            print(f"step {step}: NaN gradient norm, step skipped")
            opt.zero_grad()
            continue
        opt.step()


@torch.no_grad()
def predict(model, x, site):
    return model(x, site).softmax(-1)
