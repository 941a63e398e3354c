import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

STOPWORDS = 5


class Articles(Dataset):
    def __init__(self, n=40, vocab=60):
        g = torch.Generator().manual_seed(19)
        self.tokens = [torch.randint(0, vocab, (int(k),), generator=g) for k in torch.randint(8, 14, (n,), generator=g)]
        self.tags = (torch.rand(n, 3, generator=g) < 0.4).float()
        self.tokens[27] = torch.tensor([1, 4, 2, 2, 0, 3])

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return self.tokens[i], self.tags[i]


def collate(batch):
    tokens = nn.utils.rnn.pad_sequence([b[0] for b in batch], batch_first=True)
    return tokens, torch.stack([b[1] for b in batch])


class ContentMean(nn.Module):
    def forward(self, h, keep):
        keep = keep.unsqueeze(-1).to(h.dtype)
        return (h * keep).sum(1) / keep.sum(1)


class Tagger(nn.Module):
    def __init__(self, vocab=60, d=16, tags=3):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.mixer = nn.Sequential(nn.Linear(d, d), nn.ReLU())
        self.pool = ContentMean()
        self.out = nn.Linear(d, tags)

    def forward(self, tokens):
        return self.out(self.pool(self.mixer(self.embed(tokens)), tokens >= STOPWORDS))


def main():
    torch.manual_seed(0)
    model = Tagger()
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step, (tokens, tags) in enumerate(DataLoader(Articles(), batch_size=5, collate_fn=collate)):
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(tokens)
        loss = F.binary_cross_entropy_with_logits(logits.float(), tags)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
