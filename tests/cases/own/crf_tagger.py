import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class CRF(nn.Module):
    def __init__(self, tags=4):
        super().__init__()
        self.trans = nn.Parameter(0.1 * torch.randn(tags, tags))
        start = torch.zeros(tags)
        start[2:] = float("-inf")  # a sentence cannot start inside an entity
        self.register_buffer("start", start)

    def log_z(self, emit):
        alpha = self.start + emit[:, 0]
        for t in range(1, emit.shape[1]):
            alpha = torch.logsumexp(alpha.unsqueeze(2) + self.trans, dim=1) + emit[:, t]
        return torch.logsumexp(alpha, dim=1)

    def gold(self, emit, tags):
        score = emit.gather(2, tags.unsqueeze(2)).squeeze(2).sum(1)
        return score + self.trans[tags[:, :-1], tags[:, 1:]].sum(1)

    def forward(self, emit, tags):
        return (self.log_z(emit) - self.gold(emit, tags)).mean()

    @torch.no_grad()
    def decode(self, emit):
        best = torch.full_like(emit[:, 0], float("-inf"))
        best[:, 0] = emit[:, 0, 0]
        for t in range(1, emit.shape[1]):
            best = (best.unsqueeze(2) + self.trans).max(1).values + emit[:, t]
        return best.max(1).values


class Tagger(nn.Module):
    def __init__(self, vocab=30, d=16, tags=4):
        super().__init__()
        self.emb = nn.Embedding(vocab, d, max_norm=1.0)
        self.rnn = nn.GRU(d, d, batch_first=True)
        self.out = nn.Linear(d, tags)
        self.crf = CRF(tags)

    def emissions(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])


def main():
    torch.manual_seed(0)
    ids = torch.randint(0, 30, (60, 7))
    tags = ids % 4
    tags[:, 0] %= 2
    model = Tagger()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    it = iter(DataLoader(TensorDataset(ids, tags), batch_size=6, num_workers=2))
    for step in range(10):
        x, y = next(it)
        emit = model.emissions(x)
        loss = model.crf(emit, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f} viterbi {model.crf.decode(emit.detach()).mean().item():.3f}")


if __name__ == "__main__":
    main()
