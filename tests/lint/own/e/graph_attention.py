import torch
from torch import nn
import torch.nn.functional as F


class GATLayer(nn.Module):
    def __init__(self, d_in: int, d_out: int, heads: int = 4, slope: float = 0.2):
        super().__init__()
        self.heads, self.d = heads, d_out // heads
        self.lin = nn.Linear(d_in, d_out, bias=False)
        self.a_src = nn.Parameter(torch.randn(heads, self.d) * 0.1)
        self.a_dst = nn.Parameter(torch.randn(heads, self.d) * 0.1)
        self.slope = slope

    def forward(self, x, adj):
        n = x.size(0)
        h = self.lin(x).view(n, self.heads, self.d)
        e = (h * self.a_src).sum(-1).unsqueeze(1) + (h * self.a_dst).sum(-1).unsqueeze(0)
        e = F.leaky_relu(e, self.slope)
        e = e.masked_fill(adj.unsqueeze(-1) == 0, float("-inf"))
        a = torch.softmax(e, dim=1)
        return torch.einsum("ijh,jhd->ihd", a, h).flatten(1)


class GAT(nn.Module):
    def __init__(self, d_in, hidden, classes):
        super().__init__()
        self.l1 = GATLayer(d_in, hidden)
        self.l2 = nn.Linear(hidden, classes)

    def forward(self, x, adj):
        return self.l2(F.elu(self.l1(x, adj)))


def train(model, data, epochs=200):
    opt = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
    for _ in range(epochs):
        out = model(data.x, data.adj)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        opt.zero_grad()
        loss.backward()
        opt.step()
