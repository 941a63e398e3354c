import torch
from torch import nn
from sklearn.metrics import roc_auc_score


class DeepFM(nn.Module):
    def __init__(self, fields, dim=16, hidden=(400, 400)):
        super().__init__()
        total = sum(fields)
        self.first, self.emb = nn.Embedding(total, 1), nn.Embedding(total, dim)
        self.bias = nn.Parameter(torch.zeros(1))
        nn.init.xavier_uniform_(self.emb.weight)
        layers, d = [], dim * len(fields)
        for h in hidden:
            layers += [nn.Linear(d, h), nn.BatchNorm1d(h), nn.ReLU(), nn.Dropout(0.2)]
            d = h
        self.mlp = nn.Sequential(*layers, nn.Linear(d, 1))
        self.sigmoid = nn.Sigmoid()

    def forward(self, x):
        e = self.emb(x)
        fm = 0.5 * (e.sum(1).pow(2) - e.pow(2).sum(1)).sum(1, keepdim=True)
        logit = self.bias + self.first(x).sum(1) + fm + self.mlp(e.flatten(1))
        return self.sigmoid(logit).squeeze(1)


criterion = nn.BCELoss()


def train_epoch(model, loader, opt, device):
    model.train()
    total = 0.0
    for x, click in loader:
        y = model(x.to(device))
        loss = criterion(y, click.float().to(device))
        model.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item()
    return total / len(loader)


@torch.no_grad()
def auc(model, loader, device):
    model.eval()
    ys, ps = [], []
    for x, click in loader:
        ps.extend(model(x.to(device)).tolist())
        ys.extend(click.tolist())
    return roc_auc_score(ys, ps)
