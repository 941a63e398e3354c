import torch
from torch import nn
import torch.nn.functional as F

torch.autograd.set_detect_anomaly(True)


class BeatClassifier(nn.Module):
    def __init__(self, leads: int = 12, hidden: int = 128, classes: int = 5):
        super().__init__()
        self.conv = nn.Conv1d(leads, 64, 7, padding=3)
        self.lstm = nn.LSTM(64, hidden, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(2 * hidden, classes)

    def forward(self, x):
        h = F.relu(self.conv(x)).transpose(1, 2)
        h, _ = self.lstm(h)
        return self.fc(h.mean(1))


def normalise(sig: torch.Tensor) -> torch.Tensor:
    return (sig - sig.mean(-1, keepdim=True)) / sig.std(-1, keepdim=True)


def train(loader, epochs: int = 30, device: str = "cuda"):
    model = BeatClassifier().to(device)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for sig, y in loader:
            logits = model(normalise(sig.to(device)))
            loss = F.cross_entropy(logits, y.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(f"epoch {epoch}: loss {loss.item():.4f}")
