import math

import torch
import torch.nn as nn

PAD = 1
LOSS_CAP = torch.tensor(15.0, device="cuda")


class NMT(nn.Module):
    def __init__(self, src_vocab, tgt_vocab, d=512):
        super().__init__()
        self.src, self.tgt = nn.Embedding(src_vocab, d, padding_idx=PAD), nn.Embedding(tgt_vocab, d, padding_idx=PAD)
        pos = torch.arange(1024).unsqueeze(1)
        freq = torch.exp(torch.arange(0, d, 2) * (-math.log(10000.0) / d))
        pe = torch.zeros(1024, d)
        pe[:, 0::2], pe[:, 1::2] = torch.sin(pos * freq), torch.cos(pos * freq)
        self.register_buffer("pe", pe)
        self.core = nn.Transformer(d, 8, 6, 6, batch_first=True)
        self.gen = nn.Linear(d, tgt_vocab)
        self.d = d

    def forward(self, src, tgt):
        s = self.src(src) * math.sqrt(self.d) + self.pe[:src.size(1)]
        t = self.tgt(tgt) * math.sqrt(self.d) + self.pe[:tgt.size(1)]
        causal = nn.Transformer.generate_square_subsequent_mask(tgt.size(1), device=src.device)
        return self.gen(self.core(s, t, tgt_mask=causal, src_key_padding_mask=src == PAD, memory_key_padding_mask=src == PAD))


def train_epoch(model, batches, opt, sched):
    crit = nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=0.1)
    total = 0.0
    for src, tgt in batches:
        logits = model(src, tgt[:, :-1])
        loss = torch.minimum(crit(logits.flatten(0, 1), tgt[:, 1:].flatten()), LOSS_CAP)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e4)
        opt.step()
        sched.step()
        total += loss.item()
    mean = total / len(batches)
    return mean, math.exp(min(mean, 100.0))
