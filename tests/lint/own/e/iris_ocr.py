import torch
from torch import nn


class CRNN(nn.Module):
    def __init__(self, n_chars: int, hidden: int = 256):
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        )
        self.rnn = nn.GRU(128 * 8, hidden, num_layers=2, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(2 * hidden, n_chars + 1)

    def forward(self, x):
        f = self.cnn(x).permute(0, 3, 1, 2).flatten(2)
        out, _ = self.rnn(f)
        return self.fc(out).log_softmax(-1)


def train(loader, n_chars, epochs=50, device="cuda"):
    model = CRNN(n_chars).to(device)
    criterion = nn.CTCLoss(blank=0, zero_infinity=True)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for img, text, text_len in loader:
            lp = model(img.to(device)).transpose(0, 1)
            in_len = torch.full((lp.size(1),), lp.size(0), dtype=torch.long)
            loss = criterion(lp, text, in_len, text_len)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.save(model.state_dict(), f"crnn_{epoch}.pt")
