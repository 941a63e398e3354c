import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.cuda import amp


class ASRModel(nn.Module):
    def __init__(self, n_mels=80, d=256, vocab=32):
        super().__init__()
        self.sub = nn.Sequential(nn.Conv1d(n_mels, d, 3, 2, 1), nn.GELU(), nn.Conv1d(d, d, 3, 2, 1), nn.GELU())
        layer = nn.TransformerEncoderLayer(d, 4, 1024, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, 8)
        self.fc = nn.Linear(d, vocab)

    def forward(self, mel):
        return self.fc(self.enc(self.sub(mel).transpose(1, 2)))


def train(model, loader, optimizer, scheduler, epochs):
    ctc = nn.CTCLoss(blank=0, zero_infinity=True)
    scaler = amp.GradScaler()
    for epoch in range(epochs):
        for mel, mel_len, text, text_len in loader:
            optimizer.zero_grad()
            with amp.autocast():
                logits = model(mel.cuda())
            logp = torch.log(F.softmax(logits.float(), dim=-1)).transpose(0, 1)
            loss = ctc(logp, text.cuda(), mel_len // 4, text_len)
            scaler.scale(loss).backward()
            nn.utils.clip_grad_value_(model.parameters(), clip_value=1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
        print(f"epoch {epoch}: {loss.item():.3f}")
