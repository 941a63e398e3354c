import torch
import torch.nn as nn


class PointerDecoder(nn.Module):
    def __init__(self, d: int = 128, clip_logits: float = 10.0):
        super().__init__()
        self.gru = nn.GRUCell(d, d)
        self.wq, self.wk = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.clip = clip_logits

    def forward(self, nodes, demand, capacity):
        b, n, d = nodes.shape
        k = self.wk(nodes)
        h, x = nodes.mean(1), nodes[:, 0]
        visited = torch.zeros(b, n, dtype=torch.bool, device=nodes.device)
        load, logps, tour = capacity.clone(), [], []
        for _ in range(n):
            h = self.gru(x, h)
            u = self.clip * torch.tanh((k @ self.wq(h).unsqueeze(-1)).squeeze(-1) / d ** 0.5)
            u[visited | (demand > load[:, None])] = float("-inf")
            p = u.softmax(-1)
            a = torch.multinomial(p, 1).squeeze(1)
            logps.append(p.gather(1, a[:, None]).squeeze(1).clamp(min=1e-12).log())
            visited = visited.scatter(1, a[:, None], True)
            load = load - demand.gather(1, a[:, None]).squeeze(1)
            x = nodes[torch.arange(b), a]
            tour.append(a)
        return torch.stack(tour, 1), torch.stack(logps, 1).sum(1)


def reinforce(model, env, opt, steps=10_000):
    base = None
    for _ in range(steps):
        nodes, demand, cap, coords = env.batch(512)
        tour, logp = model(nodes, demand, cap)
        cost = env.length(coords, tour)
        base = cost.mean() if base is None else 0.9 * base + 0.1 * cost.mean()
        loss = ((cost - base).detach() * logp).mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
