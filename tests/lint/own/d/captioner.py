import argparse
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence


class DecoderRNN(nn.Module):
    def __init__(self, embed, hidden, vocab, layers=1):
        super().__init__()
        self.embed = nn.Embedding(vocab, embed)
        self.gru = nn.GRU(embed, hidden, layers, batch_first=True)
        self.fc = nn.Linear(hidden, vocab)

    def forward(self, feats, captions, lengths):
        e = torch.cat([feats.unsqueeze(1), self.embed(captions)], 1)
        packed = pack_padded_sequence(e, lengths, batch_first=True, enforce_sorted=False)
        return self.fc(self.gru(packed)[0].data)

    @torch.no_grad()
    def sample(self, feats, max_len=20, temperature=1.0):
        ids, state, x = [], None, feats.unsqueeze(1)
        for _ in range(max_len):
            h, state = self.gru(x, state)
            p = (self.fc(h.squeeze(1)) / max(temperature, 1e-3)).softmax(-1)
            tok = torch.multinomial(p, 1)
            ids.append(tok)
            x = self.embed(tok)
        return torch.cat(ids, 1)


def main(encoder, decoder, loader):
    p = argparse.ArgumentParser()
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--max-norm", type=float, default=5.0)
    p.add_argument("--anomaly", action="store_true")
    args = p.parse_args()
    torch.autograd.set_detect_anomaly(args.anomaly)
    params = [*decoder.parameters(), *encoder.fc.parameters()]
    opt = torch.optim.Adam(params, lr=args.lr)
    crit = nn.CrossEntropyLoss()
    for img, cap, length in loader:
        target = pack_padded_sequence(cap, length, batch_first=True, enforce_sorted=False).data
        loss = crit(decoder(encoder(img), cap[:, :-1], length), target)
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, max_norm=args.max_norm)
        opt.step()
