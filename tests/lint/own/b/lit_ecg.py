import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics.classification import MultilabelAUROC


class ArrhythmiaLSTM(pl.LightningModule):
    def __init__(self, leads: int = 12, hidden: int = 128, n_labels: int = 27, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.stem = nn.Sequential(nn.Conv1d(leads, hidden, 15, stride=4, padding=7), nn.BatchNorm1d(hidden), nn.ReLU())
        self.rnn = nn.LSTM(hidden, hidden, 2, batch_first=True, bidirectional=True, dropout=0.2)
        self.head = nn.Linear(2 * hidden, n_labels)
        self.register_buffer("pos_weight", torch.ones(n_labels))
        self.auroc = MultilabelAUROC(n_labels)

    def forward(self, x):
        h, _ = self.rnn(self.stem(x).transpose(1, 2))
        return self.head(h.amax(1))

    def training_step(self, batch, _):
        x, y = batch
        loss = F.binary_cross_entropy_with_logits(self(x), y, pos_weight=self.pos_weight)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        self.auroc.update(torch.sigmoid(self(x)), y.long())

    def on_validation_epoch_end(self):
        self.log("val/auroc", self.auroc.compute())
        self.auroc.reset()

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=1e-2)
        return {"optimizer": opt, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(opt, self.trainer.max_epochs)}


def main(dm):
    ckpt = pl.callbacks.ModelCheckpoint(monitor="val/auroc", mode="max")
    trainer = pl.Trainer(max_epochs=50, precision="16-mixed", gradient_clip_val=1.0, callbacks=[ckpt])
    trainer.fit(ArrhythmiaLSTM(), dm)
