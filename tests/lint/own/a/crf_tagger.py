import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Tagger(nn.Module):
    def __init__(self, vocab, n_tags, d=128, h=256):
        super().__init__()
        self.emb = nn.Embedding(vocab, d, padding_idx=0)
        self.rnn = nn.GRU(d, h, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * h, n_tags)
        self.trans = nn.Parameter(torch.empty(n_tags, n_tags))
        self.reset_parameters()

    def reset_parameters(self):
        with torch.no_grad():
            self.trans.uniform_(-0.1, 0.1)

    def forward(self, ids, lens):
        packed = pack_padded_sequence(self.emb(ids), lens.cpu(), batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.out(h)

    def log_partition(self, emit, mask):
        alpha = emit[:, 0]
        for t in range(1, emit.size(1)):
            nxt = torch.logsumexp(alpha.unsqueeze(2) + self.trans, dim=1) + emit[:, t]
            alpha = torch.where(mask[:, t, None], nxt, alpha)
        return torch.logsumexp(alpha, dim=1)


def gold_score(trans, emit, tags, mask):
    e = emit.gather(2, tags.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    t = trans[tags[:, :-1].clamp(min=0), tags[:, 1:].clamp(min=0)]
    return (e * mask).sum(1) + (t * mask[:, 1:]).sum(1)


def limit_gradients(net, value=1.0):
    torch.nn.utils.clip_grad_value_(net.parameters(), value)


def fit(net, loader, epochs=20, debug=False):
    if debug:
        torch.autograd.set_detect_anomaly(True)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(epochs):
        for ids, lens, tags in loader:
            mask = tags >= 0
            emit = net(ids, lens)
            loss = (net.log_partition(emit, mask) - gold_score(net.trans, emit, tags, mask)).mean()
            opt.zero_grad()
            loss.backward()
            limit_gradients(net)
            opt.step()
