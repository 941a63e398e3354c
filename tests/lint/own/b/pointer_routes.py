import torch
import torch.nn as nn
import torch.nn.functional as F


class PointerDecoder(nn.Module):
    """Picks the next stop of a delivery tour."""

    def __init__(self, dim=128):
        super().__init__()
        self.enc = nn.LSTM(2, dim, batch_first=True)
        self.cell = nn.LSTMCell(dim, dim)
        self.wq, self.wk = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.v = nn.Parameter(torch.empty(dim).uniform_(-0.08, 0.08))

    def forward(self, xy, tour):
        mem, (h, c) = self.enc(xy)
        h, c = h[0], c[0]
        inp = mem.mean(1)
        visited = torch.zeros(xy.shape[:2], dtype=torch.bool, device=xy.device)
        total = 0.0
        for t in range(tour.size(1)):
            h, c = self.cell(inp, (h, c))
            u = torch.tanh(self.wq(h).unsqueeze(1) + self.wk(mem)) @ self.v
            u = u.masked_fill(visited, float("-inf"))
            total = total + F.cross_entropy(u, tour[:, t])
            visited = visited.scatter(1, tour[:, t:t + 1], True)
            inp = mem[torch.arange(len(mem)), tour[:, t]]
        return total / tour.size(1)


def tour_length(xy, tour):
    p = xy.gather(1, tour.unsqueeze(-1).expand(-1, -1, 2))
    return (p - p.roll(-1, 1)).norm(dim=-1).sum(1)


def train(model, loader, epochs=50):
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for xy, tour in loader:
            loss = model(xy, tour)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=2.0)
            opt.step()
        print(f"{epoch}: {loss.item():.4f}")
