import torch
from torch import nn
import torch.nn.functional as F


class ProdLDA(nn.Module):
    def __init__(self, vocab: int, topics: int = 50, hidden: int = 100, p: float = 0.2):
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(vocab, hidden), nn.Softplus(), nn.Linear(hidden, hidden), nn.Softplus(), nn.Dropout(p))
        self.mu, self.logvar = nn.Linear(hidden, topics), nn.Linear(hidden, topics)
        self.beta = nn.Linear(topics, vocab, bias=False)
        self.bn = nn.BatchNorm1d(vocab, affine=False)

    def forward(self, bow):
        h = self.fc(bow)
        mu, logvar = self.mu(h), self.logvar(h)
        std = torch.exp(logvar / 2)
        z = mu + std * torch.randn_like(std)
        theta = F.softmax(z, dim=1)
        return F.softmax(self.bn(self.beta(theta)), dim=1), mu, logvar


def elbo(bow, word_dist, mu, logvar):
    rec = -(bow * torch.log(word_dist)).sum(1)
    kl = 0.5 * (mu ** 2 + logvar.exp() - 1 - logvar).sum(1)
    return (rec + kl).mean()


@torch.no_grad()
def perplexity(model, loader):
    nll, words = 0.0, 0.0
    for bow in loader:
        dist, _, _ = model(bow)
        nll -= (bow * torch.log(dist + 1e-10)).sum().item()
        words += bow.sum().item()
    return torch.tensor(nll / max(words, 1.0)).clamp(max=20).exp().item()


def train(model, loader, epochs=80):
    opt = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.99, 0.999))
    for epoch in range(epochs):
        for bow in loader:
            loss = elbo(bow, *model(bow))
            opt.zero_grad()
            loss.backward()
            opt.step()
        if epoch % 10 == 0:
            print(epoch, f"{perplexity(model, loader):.1f}")
