import torch
from torch import nn
import torch.nn.functional as F


class CRNN(nn.Module):
    def __init__(self, classes: int, hid: int = 256):
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(1, 64, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(64, 128, 3, 1, 1), nn.ReLU(), nn.AdaptiveAvgPool2d((1, None)),
        )
        self.rnn = nn.LSTM(128, hid, 2, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(2 * hid, classes)

    def forward(self, img):
        f = self.cnn(img).squeeze(2).transpose(1, 2)
        return self.fc(self.rnn(f)[0]).log_softmax(-1)


def train(model, loader, device, epochs=50):
    ctc = nn.CTCLoss(zero_infinity=True)
    opt = torch.optim.Adam(model.parameters(), lr=5e-4)
    for epoch in range(epochs):
        for img, text, lens in loader:
            lp = model(img.to(device)).transpose(0, 1)
            sizes = torch.full((lp.size(1),), lp.size(0), dtype=torch.long)
            loss = ctc(lp, text, sizes, lens)
            opt.zero_grad()
            loss.backward()
            total = torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            if torch.isfinite(total):
                opt.step()
        print(epoch, loss.item())


@torch.no_grad()
def confidence(model, img):
    lp = model(img)
    return lp.max(-1).values.mean(1).exp()


def load(model, path):
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return model.eval()
