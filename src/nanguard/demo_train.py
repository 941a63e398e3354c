"""A training script as anyone would write it, with a fault in it: ``nanguard demo`` runs it.

One document in the data has no words of interest, so the mean over its words divides by zero.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Tagger(nn.Module):
    """Reads the words of a document and says what it is about."""

    def __init__(self, words: int = 40, topics: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, 16)
        self.head = nn.Linear(16, topics)

    def forward(self, words: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        """Returns what each document may be about."""
        vectors = self.embed(words) * known.unsqueeze(-1)
        mean = vectors.sum(1) / known.sum(1, keepdim=True)
        out: torch.Tensor = self.head(mean)
        return out


def main() -> None:
    """Trains for one pass over the data."""
    torch.manual_seed(0)
    words = torch.randint(0, 40, (96, 12))
    known = (torch.rand(96, 12) < 0.7).float()
    known[45] = 0
    topics = words[:, 0] % 3
    loader = DataLoader(TensorDataset(words, known, topics), batch_size=8)
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for words, known, topics in loader:
        loss = nn.functional.cross_entropy(model(words, known), topics)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
