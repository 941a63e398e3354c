import torch
import torch.nn as nn
import torch.nn.functional as F


class PowerCompress(nn.Module):
    """Cochlea-like power-law compression of magnitudes."""

    def __init__(self, exponent=0.5):
        super().__init__()
        self.exponent = exponent

    def forward(self, mag):
        return mag ** self.exponent


class MaskEstimator(nn.Module):
    def __init__(self, bins=16, hidden=24):
        super().__init__()
        self.rnn = nn.GRU(bins, hidden, batch_first=True)
        self.mask = nn.Linear(hidden, bins)

    def forward(self, mag):
        h, _ = self.rnn(mag)
        return torch.sigmoid(self.mask(h))


class Enhancer(nn.Module):
    def __init__(self):
        super().__init__()
        self.estimator = MaskEstimator()
        self.post = nn.ModuleDict({"compress": PowerCompress(), "smooth": nn.Conv1d(16, 16, 3, padding=1)})

    def forward(self, noisy):
        enhanced = self.estimator(noisy) * noisy
        out = self.post["compress"](enhanced)
        return out + 0.1 * self.post["smooth"](out.transpose(1, 2)).transpose(1, 2)


def utterances(g, step, batch=5, frames=12, bins=16):
    clean = torch.rand(batch, frames, bins, generator=g) + 0.05
    noisy = clean + 0.3 * torch.rand(batch, frames, bins, generator=g)
    if step == 4:  # shorter utterance, zero-padded at the end
        noisy[3, 9:] = 0.0
        clean[3, 9:] = 0.0
    return noisy, clean


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(6)
    model = Enhancer()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(8):
        noisy, clean = utterances(g, step)
        loss = F.l1_loss(model(noisy), clean.sqrt())
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
