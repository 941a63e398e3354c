import torch
import torch.nn as nn
import torch.nn.functional as F


class Generator(nn.Module):
    def __init__(self, vocab, emb=64, hidden=256, max_len=20):
        super().__init__()
        self.emb = nn.Embedding(vocab, emb)
        self.lstm = nn.LSTMCell(emb, hidden)
        self.out = nn.Linear(hidden, vocab)
        self.max_len, self.hidden = max_len, hidden

    @staticmethod
    def gumbel_like(t):
        u = torch.zeros_like(t).uniform_(0, 1)
        return -torch.log(-torch.log(u))

    def forward(self, batch, tau, start=1):
        dev = self.emb.weight.device
        h = c = torch.zeros(batch, self.hidden, device=dev)
        x = self.emb(torch.full((batch,), start, device=dev))
        seq = []
        for _ in range(self.max_len):
            h, c = self.lstm(x, (h, c))
            logits = self.out(h)
            p = F.softmax((logits + self.gumbel_like(logits)) / tau, dim=-1)
            seq.append(p)
            x = p @ self.emb.weight
        return torch.stack(seq, 1)


def train(gen, disc, real_batches, epochs=100, lr=1e-4):
    opt_g = torch.optim.Adam(gen.parameters(), lr=lr, betas=(0.5, 0.9))
    opt_d = torch.optim.Adam(disc.parameters(), lr=lr, betas=(0.5, 0.9))
    for epoch in range(epochs):
        tau = max(0.5, 2.0 * 0.97 ** epoch)
        for ids in real_batches:
            real = F.one_hot(ids, gen.out.out_features).float()
            fake = gen(ids.size(0), tau)
            d_loss = F.softplus(disc(fake.detach())).mean() + F.softplus(-disc(real)).mean()
            opt_d.zero_grad()
            d_loss.backward()
            opt_d.step()
            g_loss = F.softplus(-disc(fake)).mean()
            opt_g.zero_grad()
            g_loss.backward()
            opt_g.step()
        print(f"epoch {epoch} d {d_loss.item():.3f} g {g_loss.item():.3f}")
