import torch
import torch.nn as nn
import torch.nn.functional as F


def scatter_softmax(score, index, nodes):
    top = torch.full((nodes,), float("-inf")).scatter_reduce(0, index, score.detach(), "amax")
    e = torch.exp(score - top[index])
    total = torch.zeros(nodes).index_add(0, index, e)
    return e / total[index]


class GATLayer(nn.Module):
    def __init__(self, d_in, d):
        super().__init__()
        self.lin = nn.Linear(d_in, d, bias=False)
        self.src, self.dst = nn.Linear(d, 1), nn.Linear(d, 1)

    def forward(self, x, edges):
        h = self.lin(x)
        s, t = edges
        score = F.leaky_relu(self.src(h)[s] + self.dst(h)[t], 0.2).squeeze(1)
        weight = scatter_softmax(score, t, len(x))
        return torch.zeros_like(h).index_add(0, t, weight.unsqueeze(1) * h[s]) + h


class GAT(nn.Module):
    def __init__(self, d=6, h=16, classes=3):
        super().__init__()
        self.l1, self.l2 = GATLayer(d, h), GATLayer(h, classes)

    def forward(self, x, edges):
        return self.l2(F.elu(self.l1(x, edges)), edges)


def neighbour_rate(y, edges, nodes):
    """Share of same-class neighbours; isolated nodes are 0/0 and replaced."""
    same = torch.zeros(nodes).index_add(0, edges[1], (y[edges[0]] == y[edges[1]]).float())
    degree = torch.bincount(edges[1], minlength=nodes).float()
    rate = same / degree
    return torch.where(degree > 0, rate, torch.zeros_like(rate))


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(100)
    model = GAT()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(10):
        x = torch.randn(18, 6, generator=g)
        y = x[:, :3].argmax(1)
        edges = torch.randint(0, 14, (2, 40), generator=g)  # nodes 14..17 are isolated
        weight = 0.5 + neighbour_rate(y, edges, 18)
        loss = (weight * F.cross_entropy(model(x, edges), y, reduction="none")).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
