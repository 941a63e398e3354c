import pytorch_lightning as pl
import torch
from torch import nn


class DeepAR(pl.LightningModule):
    """Probabilistic forecaster with a Gaussian output."""

    def __init__(self, n_feat: int, hidden: int = 64, layers: int = 2):
        super().__init__()
        self.save_hyperparameters()
        self.cell = nn.LSTM(input_size=n_feat, hidden_size=hidden, num_layers=layers, batch_first=True)
        self.loc = nn.Linear(hidden, 1)
        self.log_scale = nn.Linear(hidden, 1)

    def forward(self, x):
        h, _ = self.cell(x)
        return self.loc(h).squeeze(-1), self.log_scale(h).squeeze(-1)

    def training_step(self, batch, batch_idx):
        x, y, observed = batch
        loc, log_s = self(x)
        z = (y - loc) * torch.exp(-log_s)
        nll = 0.5 * z.pow(2) + log_s
        loss = (nll * observed).sum() / observed.sum().clamp(min=1.0)
        self.log("train_nll", loss, prog_bar=True)
        return loss

    def on_after_backward(self):
        for name, p in self.named_parameters():
            if p.grad is not None and not p.grad.isfinite().all():
                self.print(f"bad gradient in {name}")
                p.grad.fill_(0.0)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main(dm):
    trainer = pl.Trainer(max_epochs=50, accelerator="auto", log_every_n_steps=20)
    trainer.fit(DeepAR(n_feat=dm.n_feat), datamodule=dm)
