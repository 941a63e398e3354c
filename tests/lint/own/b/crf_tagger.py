import argparse
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--grad-clip", type=float, default=5.0)
parser.add_argument("--detect-anomaly", action="store_true")


class CRF(nn.Module):
    def __init__(self, n: int, pad: int = 0):
        super().__init__()
        self.trans = nn.Parameter(torch.empty(n, n))
        self.start = nn.Parameter(torch.empty(n))
        nn.init.uniform_(self.trans, -0.1, 0.1)
        nn.init.uniform_(self.start, -0.1, 0.1)
        with torch.no_grad():
            self.trans[:, pad] = -1e4

    def score(self, em, tags, mask):
        s = self.start[tags[:, 0]] + em[:, 0].gather(1, tags[:, :1]).squeeze(1)
        for t in range(1, em.size(1)):
            step = self.trans[tags[:, t - 1], tags[:, t]] + em[:, t].gather(1, tags[:, t:t + 1]).squeeze(1)
            s = s + step * mask[:, t]
        return s

    def partition(self, em, mask):
        a = self.start + em[:, 0]
        for t in range(1, em.size(1)):
            nxt = torch.logsumexp(a.unsqueeze(2) + self.trans, 1) + em[:, t]
            a = torch.where(mask[:, t:t + 1] > 0, nxt, a)
        return a.logsumexp(1)


class Tagger(nn.Module):
    def __init__(self, vocab, tags, d=100, h=200):
        super().__init__()
        self.emb, self.lstm = nn.Embedding(vocab, d, padding_idx=0), nn.LSTM(d, h, batch_first=True, bidirectional=True)
        self.fc, self.crf = nn.Linear(2 * h, tags), CRF(tags)

    def loss(self, x, y, mask):
        em = self.fc(self.lstm(self.emb(x))[0])
        return (self.crf.partition(em, mask) - self.crf.score(em, y, mask)).mean()


def train(model, loader, args):
    torch.autograd.set_detect_anomaly(args.detect_anomaly)
    opt = torch.optim.SGD(model.parameters(), lr=0.015, momentum=0.9)
    for x, y, mask in loader:
        opt.zero_grad()
        loss = model.loss(x, y, mask)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
        opt.step()
