import torch
from torch import nn


class CRNN(nn.Module):
    def __init__(self, n_char, nh=256):
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(1, 64, 3, 1, 1), nn.ReLU(True), nn.MaxPool2d(2, 2),
            nn.Conv2d(64, 128, 3, 1, 1), nn.ReLU(True), nn.MaxPool2d((2, 1)),
            nn.Conv2d(128, nh, 3, 1, 1), nn.BatchNorm2d(nh), nn.ReLU(True), nn.AdaptiveMaxPool2d((1, None)),
        )
        self.rnn = nn.LSTM(nh, nh, num_layers=2, bidirectional=True)
        self.out = nn.Linear(2 * nh, n_char)

    def forward(self, x):
        seq = self.cnn(x).squeeze(2).permute(2, 0, 1)
        return self.out(self.rnn(seq)[0]).log_softmax(2)


def train(loader, n_char, epochs=30, device="cuda"):
    model = CRNN(n_char).to(device)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    ctc = nn.CTCLoss(blank=0, reduction="none")
    for epoch in range(epochs):
        for img, text, lens in loader:
            logp = model(img.to(device))
            t = torch.full((img.size(0),), logp.size(0), dtype=torch.long)
            per = ctc(logp, text.to(device), t, lens)
            per = torch.where(torch.isfinite(per), per, torch.zeros_like(per))
            loss = per.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())
