import pickle

import torch
from torch import nn, Tensor


class SlotMemory(nn.Module):
    def __init__(self, slots: int, dim: int, n_hops: int = 3):
        super().__init__()
        self.keys = nn.ParameterList([nn.Parameter(torch.Tensor(slots, dim)) for _ in range(n_hops)])
        self.values = nn.ParameterList([nn.Parameter(torch.randn(slots, dim) * 0.02) for _ in range(n_hops)])
        self.gate = nn.Parameter(torch.empty(n_hops))
        self.reset_parameters()

    def reset_parameters(self):
        for v in self.values:
            nn.init.orthogonal_(v)
        nn.init.constant_(self.gate, -2.0)

    def read(self, q: Tensor, hop: int) -> Tensor:
        att = (q @ self.keys[hop].T * q.size(-1) ** -0.5).softmax(-1)
        return att @ self.values[hop]

    def forward(self, q: Tensor) -> Tensor:
        for hop in range(len(self.keys)):
            q = q + torch.sigmoid(self.gate[hop]) * self.read(q, hop)
        return q


class QA(nn.Module):
    def __init__(self, vocab: int, dim: int = 128):
        super().__init__()
        self.bag = nn.EmbeddingBag(vocab, dim, mode="sum")
        self.mem = SlotMemory(512, dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, words, offsets):
        return self.head(self.mem(self.bag(words, offsets)))


def restore(model: nn.Module, path: str):
    with open(path, "rb") as fh:
        state = pickle.load(fh)
    model.load_state_dict({k: torch.from_numpy(v) for k, v in state["weights"].items()})
    return state["step"]
