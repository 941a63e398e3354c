import torch
from torch import nn
from torch_geometric.nn import GINEConv, global_add_pool


class MolGIN(nn.Module):
    def __init__(self, n_atom: int, n_bond: int, dim: int = 300, depth: int = 5):
        super().__init__()
        self.atom, self.bond = nn.Embedding(n_atom, dim), nn.Embedding(n_bond, dim)
        mlp = lambda: nn.Sequential(nn.Linear(dim, 2 * dim), nn.BatchNorm1d(2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))
        self.convs = nn.ModuleList(GINEConv(mlp()) for _ in range(depth))
        self.out = nn.Linear(dim, 1)

    def forward(self, data):
        h, e = self.atom(data.x), self.bond(data.edge_attr)
        for conv in self.convs:
            h = h + torch.relu(conv(h, data.edge_index, e))
            h = h.nan_to_num(0.0)
        return self.out(global_add_pool(h, data.batch)).squeeze(-1)


def per_assay_zscore(y: torch.Tensor, assay: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(y)
    for a in assay.unique():
        sel = assay == a
        v = y[sel]
        out[sel] = (v - v.mean()) / (v.std() + 1e-6)
    return out


def train_epoch(model, loader, opt):
    total = 0.0
    for data in loader:
        data = data.to("cuda")
        target = per_assay_zscore(data.y, data.assay)
        loss = nn.functional.huber_loss(model(data), target)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        total += loss.item() * data.num_graphs
    return total / len(loader.dataset)
