import torch
import torchaudio
from torch import nn

mel = torchaudio.transforms.MelSpectrogram(16000, n_mels=80)


class BiGRU(nn.Module):
    def __init__(self, n_mels=80, hidden=320, vocab=32):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(n_mels, hidden, 5, stride=2, padding=2), nn.BatchNorm1d(hidden), nn.ReLU())
        self.rnn = nn.GRU(hidden, hidden, num_layers=3, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(2 * hidden, vocab)

    def forward(self, wav):
        x = torch.log(mel(wav) + 1e-6)
        x = self.conv(x).transpose(1, 2)
        h, _ = self.rnn(x)
        return self.fc(h).log_softmax(-1)


def train(model, loader, epochs=30, device="cuda"):
    model.to(device).train()
    ctc = nn.CTCLoss(blank=0)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=1e-3)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 5e-4, total_steps=epochs * len(loader))
    for epoch in range(epochs):
        running = 0.0
        for wav, wav_len, text, text_len in loader:
            logp = model(wav.to(device))
            frames = (wav_len // 320).clamp(max=logp.size(1))
            loss = ctc(logp.transpose(0, 1), text.to(device), frames, text_len)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            running += loss.item()
        print(f"epoch {epoch}: ctc {running / len(loader):.3f}")
