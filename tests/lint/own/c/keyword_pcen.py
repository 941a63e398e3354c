import torch
import torchaudio
from torch import nn


class PCEN(nn.Module):
    def __init__(self, n_mels: int, s: float = 0.025, eps: float = 1e-6):
        super().__init__()
        self.log_alpha = nn.Parameter(torch.full((n_mels, 1), 0.98).log())
        self.delta = nn.Parameter(torch.full((n_mels, 1), 2.0))
        self.s, self.eps = s, eps

    def forward(self, e):
        m = [e[..., 0]]
        for t in range(1, e.size(-1)):
            m.append((1 - self.s) * m[-1] + self.s * e[..., t])
        m = torch.stack(m, -1)
        gain = torch.exp(-self.log_alpha.clamp(max=0.0).exp() * torch.log(m + self.eps))
        return (e * gain + self.delta.clamp(min=0.1)) ** 0.5 - self.delta.clamp(min=0.1) ** 0.5


class Cube(nn.Module):
    def forward(self, e):
        return torch.relu(e).pow(0.33)


class Spotter(nn.Module):
    def __init__(self, n_words: int, n_mels: int = 40, front: str = "pcen"):
        super().__init__()
        self.mel = torchaudio.transforms.MelSpectrogram(16_000, n_mels=n_mels)
        self.pre = nn.Conv1d(n_mels, n_mels, 3, padding=1)
        self.front = PCEN(n_mels) if front == "pcen" else Cube()
        self.rnn = nn.GRU(n_mels, 128, batch_first=True)
        self.fc = nn.Linear(128, n_words)

    def forward(self, wav):
        e = self.front(torch.relu(self.pre(self.mel(wav))))
        return self.fc(self.rnn(e.transpose(1, 2))[0][:, -1])


def train(model, loader, epochs=20):
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for wav, y in loader:
            loss = nn.functional.cross_entropy(model(wav), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
