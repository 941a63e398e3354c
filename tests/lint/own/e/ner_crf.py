import torch
from torch import nn, Tensor


class CRF(nn.Module):
    def __init__(self, tags: int):
        super().__init__()
        self.trans = nn.Parameter(torch.empty(tags, tags))
        self.start = nn.Parameter(torch.empty(tags))
        self.reset_parameters()

    def reset_parameters(self):
        for p in self.parameters():
            nn.init.uniform_(p, -0.1, 0.1)

    def log_z(self, em: Tensor, mask: Tensor) -> Tensor:
        a = self.start + em[:, 0]
        for t in range(1, em.size(1)):
            nxt = torch.logsumexp(a.unsqueeze(2) + self.trans + em[:, t].unsqueeze(1), 1)
            a = torch.where(mask[:, t].unsqueeze(1), nxt, a)
        return torch.logsumexp(a, 1)

    def score(self, em: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        s = self.start[tags[:, 0]] + em[:, 0].gather(1, tags[:, :1]).squeeze(1)
        for t in range(1, em.size(1)):
            step = self.trans[tags[:, t - 1], tags[:, t]] + em[:, t].gather(1, tags[:, t:t + 1]).squeeze(1)
            s = s + step * mask[:, t]
        return s


class Tagger(nn.Module):
    def __init__(self, vocab: int, tags: int, d: int = 100):
        super().__init__()
        self.emb = nn.Embedding(vocab, d, padding_idx=0)
        self.lstm = nn.LSTM(d, d, bidirectional=True, batch_first=True)
        self.fc, self.crf = nn.Linear(2 * d, tags), CRF(tags)

    def loss(self, ids, tags):
        mask = ids != 0
        em = self.fc(self.lstm(self.emb(ids))[0])
        return (self.crf.log_z(em, mask) - self.crf.score(em, tags, mask)).mean()


def train(model: Tagger, loader, epochs: int = 30):
    opt = torch.optim.SGD(model.parameters(), lr=0.015, momentum=0.9)
    for _ in range(epochs):
        for ids, tags in loader:
            opt.zero_grad()
            model.loss(ids, tags).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
