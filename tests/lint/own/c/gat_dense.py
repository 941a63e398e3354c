import torch
import torch.nn as nn
import torch.nn.functional as F


class GraphAttention(nn.Module):
    def __init__(self, in_f, out_f, dropout=0.6, alpha=0.2):
        super().__init__()
        self.W = nn.Parameter(torch.empty(in_f, out_f))
        nn.init.xavier_uniform_(self.W.data, gain=1.414)
        self.a = nn.Parameter(torch.empty(2 * out_f, 1))
        nn.init.xavier_uniform_(self.a.data, gain=1.414)
        self.bias = nn.Parameter(torch.FloatTensor(out_f))
        self.drop, self.out_f = dropout, out_f
        self.leaky = nn.LeakyReLU(alpha)

    def forward(self, h, adj):
        Wh = h @ self.W
        e = self.leaky(Wh @ self.a[:self.out_f] + (Wh @ self.a[self.out_f:]).T)
        att = torch.where(adj > 0, e, torch.full_like(e, -9e15))
        att = F.dropout(F.softmax(att, dim=1), self.drop, training=self.training)
        return F.elu(att @ Wh + self.bias)


class GAT(nn.Module):
    def __init__(self, nfeat, nhid, nclass, nheads):
        super().__init__()
        self.heads = nn.ModuleList(GraphAttention(nfeat, nhid) for _ in range(nheads))
        self.last = GraphAttention(nhid * nheads, nclass)

    def forward(self, x, adj):
        x = torch.cat([att(x, adj) for att in self.heads], dim=1)
        return F.log_softmax(self.last(x, adj), dim=1)


def row_normalise(adj):
    return adj / adj.sum(1, keepdim=True)


def train(model, x, adj, y, idx, epochs=300):
    adj = row_normalise(adj)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
    for epoch in range(epochs):
        model.train()
        loss = F.nll_loss(model(x, adj)[idx], y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
