import torch
from accelerate import Accelerator
from torch import nn
import torch.nn.functional as F

torch.autograd.set_detect_anomaly(mode=True)

RNNS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


class Encoder(nn.Module):
    def __init__(self, vocab, d, kind="gru"):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.rnn = RNNS[kind](d, d, batch_first=True)

    def forward(self, ids):
        return self.rnn(self.emb(ids))


class LuongDecoder(nn.Module):
    def __init__(self, vocab, d, kind="gru"):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.rnn = RNNS[kind](d, d, batch_first=True)
        self.out = nn.Linear(2 * d, vocab)

    def forward(self, ids, memory, pad, state):
        h, state = self.rnn(self.emb(ids), state)
        bias = torch.zeros_like(pad, dtype=h.dtype).masked_fill(pad, float("-inf"))
        w = torch.softmax(h @ memory.transpose(1, 2) + bias.unsqueeze(1), dim=-1)
        return self.out(torch.cat([h, w @ memory], -1)), state


def main(loader, vocab, pad_id=0, d=512):
    acc = Accelerator()
    enc, dec = Encoder(vocab, d), LuongDecoder(vocab, d)
    opt = torch.optim.Adam([*enc.parameters(), *dec.parameters()], lr=1e-3)
    enc, dec, opt, loader = acc.prepare(enc, dec, opt, loader)
    for step, (src, tgt) in enumerate(loader):
        memory, state = enc(src)
        logits, _ = dec(tgt[:, :-1], memory, src == pad_id, state)
        loss = F.cross_entropy(logits.transpose(1, 2), tgt[:, 1:], ignore_index=pad_id)
        acc.backward(loss)
        opt.step()
        opt.zero_grad()
        if step % 100 == 0:
            acc.print(step, loss.item())
