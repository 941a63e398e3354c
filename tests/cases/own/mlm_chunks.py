import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

MASK, IGNORE = 1, -100


class MaskingCollator:
    def __init__(self, rate=0.2, seed=41):
        self.rate = rate
        self.g = torch.Generator().manual_seed(seed)

    def __call__(self, texts):
        ids = nn.utils.rnn.pad_sequence([torch.tensor(t) for t in texts], batch_first=True)
        chosen = (torch.rand(ids.shape, generator=self.g) < self.rate) & (ids > 1)
        labels = torch.where(chosen, ids, IGNORE)
        return ids.masked_fill(chosen, MASK), labels


class TinyBert(nn.Module):
    def __init__(self, vocab=40, d=16):
        super().__init__()
        self.tok = nn.Embedding(vocab, d, padding_idx=0)
        self.mix = nn.GRU(d, d, batch_first=True, bidirectional=True)
        self.lm_head = nn.Linear(2 * d, vocab)

    def forward(self, ids):
        h, _ = self.mix(self.tok(ids))
        return self.lm_head(h)


def corpus(n=32):
    g = torch.Generator().manual_seed(7)
    texts = [torch.randint(2, 40, (int(k),), generator=g).tolist() for k in torch.randint(6, 15, (n,), generator=g)]
    texts[20:24] = [[5], [9], [0], [31]]
    return texts


def main():
    torch.manual_seed(0)
    model = TinyBert()
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
    warmup = torch.optim.lr_scheduler.LinearLR(opt, start_factor=0.1, total_iters=4)
    for step, (ids, labels) in enumerate(DataLoader(corpus(), batch_size=4, collate_fn=MaskingCollator())):
        logits = model(ids)
        loss = F.cross_entropy(
            logits.flatten(0, 1),
            labels.flatten(),
            ignore_index=IGNORE,
        )
        opt.zero_grad()
        loss.backward()
        opt.step()
        warmup.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
