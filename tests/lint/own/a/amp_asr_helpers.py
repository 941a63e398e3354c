import torch
from torch import nn
from torch.amp import GradScaler, autocast
from torch.nn.utils import clip_grad_norm_


class Conformerish(nn.Module):
    def __init__(self, n_mels=80, d=256, vocab=32):
        super().__init__()
        self.sub = nn.Conv1d(n_mels, d, 3, stride=2, padding=1)
        self.rnn = nn.LSTM(d, d, num_layers=3, bidirectional=True, batch_first=True)
        self.out = nn.Linear(2 * d, vocab)

    def forward(self, mel):
        mu, sd = mel.mean(-1, keepdim=True), mel.std(-1, keepdim=True, correction=0)
        mel = (mel - mu) / (sd + 1e-5)
        h, _ = self.rnn(self.sub(mel).transpose(1, 2).relu())
        return self.out(h).float().log_softmax(-1)


def clip_all(model, max_norm=1.0):
    params = [p for p in model.parameters() if p.requires_grad]
    return clip_grad_norm_(params, max_norm)


def apply_step(scaler, optimizer):
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)


def train(model, loader, device="cuda"):
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    scaler = GradScaler(device)
    ctc = nn.CTCLoss(blank=0)
    for mel, text, mel_len, text_len in loader:
        with autocast(device):
            logp = model(mel.to(device))
        loss = ctc(logp.transpose(0, 1), text.to(device), (mel_len + 1) // 2, text_len)
        scaler.scale(loss).backward()
        clip_all(model)
        apply_step(scaler, optimizer)
