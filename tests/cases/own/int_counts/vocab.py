import torch


class Counts:
    """Class weights from running counts (int16 saves memory)."""

    def __init__(self, size):
        self.counts = torch.ones(size, dtype=torch.int16)

    def update(self, tokens):
        hist = torch.bincount(tokens.flatten(), minlength=len(self.counts)) * 4
        self.counts += hist.to(torch.int16)

    def weights(self):
        total = self.counts.sum()
        return torch.sqrt(total / self.counts)
