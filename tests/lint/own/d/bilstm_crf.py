import torch
from torch import nn


class Tagger(nn.Module):
    def __init__(self, vocab: int, tags: int, emb: int = 100, hid: int = 200):
        super().__init__()
        self.emb = nn.Embedding(vocab, emb, padding_idx=0)
        self.lstm = nn.LSTM(emb, hid // 2, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(hid, tags)
        self.trans = nn.Parameter(torch.empty(tags, tags))
        self.start = nn.Parameter(torch.empty(tags))
        nn.init.uniform_(self.trans, -0.1, 0.1)
        self.start.data.zero_()

    def emissions(self, x):
        return self.fc(self.lstm(self.emb(x))[0])

    def log_z(self, e, mask):
        a = self.start + e[:, 0]
        for t in range(1, e.size(1)):
            nxt = torch.logsumexp(a.unsqueeze(2) + self.trans + e[:, t].unsqueeze(1), dim=1)
            a = torch.where(mask[:, t, None], nxt, a)
        return torch.logsumexp(a, dim=1)

    def score(self, e, y, mask):
        s = self.start[y[:, 0]] + e[:, 0].gather(1, y[:, :1]).squeeze(1)
        for t in range(1, e.size(1)):
            step = self.trans[y[:, t - 1], y[:, t]] + e[:, t].gather(1, y[:, t:t + 1]).squeeze(1)
            s = s + step * mask[:, t]
        return s

    def forward(self, x, y, mask):
        e = self.emissions(x)
        return (self.log_z(e, mask) - self.score(e, y, mask)).mean()


def train(model, loader, epochs=10, clip=5.0):
    opt = torch.optim.SGD(model.parameters(), lr=0.015, momentum=0.9)
    for _ in range(epochs):
        for x, y, mask in loader:
            opt.zero_grad()
            model(x, y, mask).backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
