import torch
import torch.nn as nn
import torch.nn.functional as F


class GatedMIL(nn.Module):
    """Attention pooling over the patches of a slide; bags are padded to the longest one."""

    def __init__(self, d_in=1024, d=256, n_cls=2):
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(d_in, d), nn.ReLU())
        self.V, self.U = nn.Linear(d, 128), nn.Linear(d, 128)
        self.w = nn.Linear(128, 1)
        self.cls = nn.Linear(d, n_cls)

    def forward(self, bag, n_patches):
        h = self.fc(bag)
        a = self.w(torch.tanh(self.V(h)) * torch.sigmoid(self.U(h))).squeeze(-1)
        idx = torch.arange(bag.size(1), device=bag.device)
        a = a.masked_fill(idx[None] >= n_patches[:, None], -torch.inf)
        a = torch.softmax(a, dim=1)
        z = torch.bmm(a.unsqueeze(1), h).squeeze(1)
        return self.cls(z), a


class MeanMIL(GatedMIL):
    def forward(self, bag, n_patches):
        h = self.fc(bag)
        keep = (torch.arange(bag.size(1), device=bag.device)[None] < n_patches[:, None]).float()
        z = (h * keep.unsqueeze(-1)).sum(1) / keep.sum(1, keepdim=True)
        return self.cls(z), None


def train(model, loader, opt, epochs=20):
    for epoch in range(epochs):
        seen = 0
        for bag, n, y in loader:
            logits, _ = model(bag.cuda(), n.cuda())
            loss = F.cross_entropy(logits, y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
            seen += (logits.argmax(1).cpu() == y).sum().item()
        print(epoch, seen / len(loader.dataset))
