import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Cells(Dataset):
    def __init__(self, n=40, genes=14, seed=6):
        rng = np.random.default_rng(seed)
        self.counts = rng.poisson(3.0, (n, genes)).astype("float32")
        self.counts[11] = 0.0    # empty droplet
        self.counts[27, 4] = -1  # not measured on this panel

    def __len__(self):
        return len(self.counts)

    def __getitem__(self, i):
        return {"counts": torch.from_numpy(self.counts[i]), "library": torch.tensor(self.counts[i].sum() + 1.0)}


class NegativeBinomialNLL(nn.Module):
    def forward(self, y, mu, r, eps=1e-8):
        log_mix = torch.log(r + mu + eps)
        ll = (
            torch.lgamma(y + r)
            - torch.lgamma(r)
            - torch.lgamma(y + 1.0)
            + r * (torch.log(r + eps) - log_mix)
            + y * (torch.log(mu + eps) - log_mix)
        )
        return -ll.sum(1).mean()


class ScVAE(nn.Module):
    def __init__(self, genes=14, h=24, z=4):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(genes, h), nn.ReLU())
        self.mu, self.logvar = nn.Linear(h, z), nn.Linear(h, z)
        self.dec = nn.Sequential(nn.Linear(z, h), nn.ReLU(), nn.Linear(h, genes))
        self.log_r = nn.Parameter(torch.zeros(genes))

    def forward(self, counts, library):
        h = self.enc(torch.log1p(counts.clamp(min=0)))
        mu, logvar = self.mu(h), self.logvar(h)
        rate = torch.softmax(self.dec(mu), dim=1) * library.unsqueeze(1)
        kl = 0.5 * (mu.pow(2) + logvar.exp() - 1.0 - logvar).sum(1).mean()
        return rate, self.log_r.exp(), kl


class Trainer:
    def __init__(self, model, lr=2e-3):
        self.model, self.nll = model, NegativeBinomialNLL()
        self.opt = torch.optim.Adam(model.parameters(), lr=lr)

    def fit(self, loader):
        for step, batch in enumerate(loader):
            rate, r, kl = self.model(**batch)
            loss = self.nll(batch["counts"], rate, r) + 0.1 * kl
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    Trainer(ScVAE()).fit(DataLoader(Cells(), batch_size=5))
