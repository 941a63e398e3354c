import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class BigramLM(nn.Module):
    def __init__(self, vocab=40, d=24):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.block = nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, d))
        self.head = nn.Linear(d, vocab)

    def forward(self, ids):
        x = self.emb(ids)
        return self.head(x + self.block(x))


@torch.no_grad()
def metrics(logits, target):
    """Diagnostics only: perplexity and relative calibration error per class."""
    nll = F.cross_entropy(logits, target, reduction="none")
    worst_ppl = torch.exp(nll.max())
    hits = torch.bincount(target, minlength=logits.shape[1]).float()
    right = torch.bincount(target[logits.argmax(1) == target], minlength=logits.shape[1]).float()
    recall = right / hits  # nan for classes absent from the batch
    return worst_ppl.item(), torch.nanmean(recall).item()


def main():
    torch.manual_seed(0)
    tokens = torch.randint(0, 40, (48, 9))
    model = BigramLM()
    with torch.no_grad():
        model.head.weight.mul_(200.0)  # confident checkpoint from another corpus
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step, (ids,) in enumerate(DataLoader(TensorDataset(tokens), batch_size=4)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids[:, :-1])
        logits, target = logits.float().flatten(0, 1), ids[:, 1:].flatten()
        loss = F.cross_entropy(logits, target)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        ppl, recall = metrics(logits, target)
        print(f"step {step} loss {loss.item():.4f} ppl {ppl:.3g} recall {recall:.3f}")


if __name__ == "__main__":
    main()
