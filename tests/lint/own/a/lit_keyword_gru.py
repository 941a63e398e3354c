import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F


class Augment(nn.Module):
    def __init__(self, p_freq: int = 12, p_time: int = 25):
        super().__init__()
        self.p_freq, self.p_time = p_freq, p_time

    def forward(self, mel):
        f = int(torch.randint(0, self.p_freq, ()))
        t = int(torch.randint(0, self.p_time, ()))
        mel = mel.clone()
        mel[:, :f] = 0.0
        mel[..., :t] = 0.0
        return mel


class KeywordSpotter(pl.LightningModule):
    def __init__(self, n_mels: int = 40, hidden: int = 128, n_words: int = 35):
        super().__init__()
        self.aug = Augment()
        self.gru = nn.GRU(n_mels, hidden, num_layers=2, batch_first=True)
        self.fc = nn.Linear(hidden, n_words)

    def forward(self, mel):
        mel = torch.log(mel + 1e-6)
        mel = mel - mel.mean(-1, keepdim=True)
        h, _ = self.gru(mel.transpose(1, 2))
        return self.fc(h.mean(1))

    def training_step(self, batch, batch_idx):
        mel, y = batch
        loss = F.cross_entropy(self(self.aug(mel)), y, label_smoothing=0.1)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        mel, y = batch
        prob = torch.softmax(self(mel), -1)
        self.log("val/acc", (prob.argmax(-1) == y).float().mean())
        self.log("val/conf", torch.nan_to_num(prob.amax(-1).mean()))

    def on_before_optimizer_step(self, optimizer):
        for name, p in self.named_parameters():
            if p.grad is not None and not torch.isfinite(p.grad).all():
                raise FloatingPointError(f"non-finite gradient in {name}")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(dm, debug: bool = False):
    trainer = pl.Trainer(max_epochs=30, gradient_clip_val=0.5, detect_anomaly=debug)
    trainer.fit(KeywordSpotter(), datamodule=dm)
