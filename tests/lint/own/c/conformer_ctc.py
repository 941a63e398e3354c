import torch
import torch.nn as nn
import torchaudio
from torchaudio.models import Conformer


class CTCModel(nn.Module):
    def __init__(self, n_tokens: int, d: int = 256):
        super().__init__()
        self.mel = torchaudio.transforms.MelSpectrogram(16000, n_fft=400, hop_length=160, n_mels=80)
        self.lin = nn.Linear(80, d)
        self.enc = Conformer(d, 4, 1024, 12, 31, dropout=0.1)
        self.out = nn.Linear(d, n_tokens)

    def forward(self, wav, wav_len):
        feat = torch.log(self.mel(wav) + 1e-6).transpose(1, 2)
        feat_len = (wav_len // 160 + 1).clamp(max=feat.size(1))
        h, h_len = self.enc(self.lin(feat), feat_len)
        return self.out(h).log_softmax(-1), h_len


def clean(batch):
    """Drops utterances with broken samples or more labels than frames."""
    wav, wav_len, text, text_len = batch
    ok = ~torch.isnan(wav).any(1) & (wav_len // 160 > text_len)
    return wav[ok], wav_len[ok], text[ok], text_len[ok]


def train(model, loader, opt, sched, epochs=80):
    ctc = nn.CTCLoss(blank=0, zero_infinity=True)
    for epoch in range(epochs):
        for batch in loader:
            wav, wav_len, text, text_len = (t.cuda() for t in clean(batch))
            if len(wav) == 0:
                continue
            logp, n = model(wav, wav_len)
            loss = ctc(logp.transpose(0, 1), text, n, text_len)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
            sched.step()
