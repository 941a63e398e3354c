import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader


class DomainHead(nn.Module):
    """One head over the union of the label sets; each domain owns a slice of it."""

    def __init__(self, dim: int, slices: dict[str, tuple[int, int]]):
        super().__init__()
        self.slices = slices
        self.names = list(slices)
        total = max(hi for _, hi in slices.values())
        self.fc = nn.Linear(dim, total)
        own = torch.zeros(len(slices), total, dtype=torch.bool)
        for i, (lo, hi) in enumerate(slices.values()):
            own[i, lo:hi] = True
        self.register_buffer("own", own)

    def forward(self, h, domain):
        logits = self.fc(h)
        logits[~self.own[domain]] = -torch.inf
        return logits


def step(backbone, head, batch, opt, crit=nn.CrossEntropyLoss()):
    x, domain, y = batch
    loss = crit(head(backbone(x), domain), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.item()


def make_loader(parts, bs=64):
    return DataLoader(ConcatDataset(parts), batch_size=bs, shuffle=True, num_workers=8, pin_memory=True)


def fit(backbone, head, parts, epochs=5, lr=1e-4):
    opt = torch.optim.AdamW([*backbone.parameters(), *head.parameters()], lr=lr)
    loader = make_loader(parts)
    with torch.autograd.set_detect_anomaly(True):
        for ep in range(epochs):
            losses = [step(backbone, head, b, opt) for b in loader]
            print(ep, sum(losses) / len(losses))
