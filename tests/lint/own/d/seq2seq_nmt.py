import random
import torch
from torch import nn, optim


class Encoder(nn.Module):
    def __init__(self, vocab, emb=256, hid=512):
        super().__init__()
        self.emb = nn.Embedding(vocab, emb, padding_idx=0)
        self.rnn = nn.GRU(emb, hid, num_layers=2, dropout=0.3)

    def forward(self, src):
        return self.rnn(self.emb(src))[1]


class Decoder(nn.Module):
    def __init__(self, vocab, emb=256, hid=512):
        super().__init__()
        self.emb = nn.Embedding(vocab, emb, padding_idx=0)
        self.rnn = nn.GRU(emb, hid, num_layers=2, dropout=0.3)
        self.out = nn.Linear(hid, vocab)

    def forward(self, tok, h):
        o, h = self.rnn(self.emb(tok).unsqueeze(0), h)
        return self.out(o.squeeze(0)), h


def train(enc, dec, loader, device, epochs=20, teacher=0.5):
    opt = optim.Adam([*enc.parameters(), *dec.parameters()], lr=1e-3)
    crit = nn.CrossEntropyLoss(ignore_index=0)
    for epoch in range(epochs):
        total = 0.0
        for src, trg in loader:
            src, trg = src.to(device), trg.to(device)
            h, tok, steps = enc(src), trg[0], []
            for t in range(1, trg.size(0)):
                logits, h = dec(tok, h)
                steps.append(logits)
                tok = trg[t] if random.random() < teacher else logits.argmax(-1)
            loss = crit(torch.cat(steps), trg[1:].flatten())
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item()
        print(f"epoch {epoch + 1}: {total / len(loader):.3f}")
