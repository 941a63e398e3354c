import torch
import torch.nn.functional as F
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import SAGEConv
from torch_geometric.utils import degree, scatter


class SAGE(torch.nn.Module):
    def __init__(self, d_in, hidden, n_cls):
        super().__init__()
        self.c1, self.c2 = SAGEConv(d_in, hidden), SAGEConv(hidden, n_cls)

    def forward(self, x, edge_index):
        h = F.dropout(self.c1(x, edge_index).relu(), 0.5, self.training)
        return self.c2(h, edge_index)


def sym_norm(edge_index, n):
    row, col = edge_index
    deg = degree(col, n)
    inv = deg.pow(-0.5)
    inv[inv == float("inf")] = 0
    return inv[row] * inv[col]


def mean_neighbour(x, edge_index):
    row, col = edge_index
    total = scatter(x[row], col, dim=0, dim_size=x.size(0), reduce="sum")
    return total / degree(col, x.size(0)).clamp(min=1).unsqueeze(-1)


def class_weights(y, n):
    freq = torch.bincount(y, minlength=n).float() + 1
    w = freq.sum() / (n * freq)
    return w ** 0.5


def train(data, epochs=10):
    n_cls = int(data.y.max()) + 1
    model = SAGE(data.num_features, 256, n_cls).cuda()
    loader = NeighborLoader(data, [15, 10], batch_size=1024, input_nodes=data.train_mask, shuffle=True)
    opt = torch.optim.Adam(model.parameters(), lr=0.003)
    weight = class_weights(data.y[data.train_mask], n_cls).cuda()
    for ep in range(epochs):
        for b in loader:
            b = b.cuda()
            out = model(b.x, b.edge_index)[:b.batch_size]
            loss = F.cross_entropy(out, b.y[:b.batch_size], weight=weight)
            opt.zero_grad()
            loss.backward()
            opt.step()
