import pytorch_lightning as pl
import torch
from torch import nn
import torch.nn.functional as F
from torch.distributions import NegativeBinomial


class DeepAR(pl.LightningModule):
    def __init__(self, n_cov: int, hidden: int = 64, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.lstm = nn.LSTM(n_cov + 1, hidden, 2, batch_first=True, dropout=0.1)
        self.mean, self.disp = nn.Linear(hidden, 1), nn.Linear(hidden, 1)

    def forward(self, past, cov):
        scale = past.abs().mean(1, keepdim=True) + 1.0
        h, _ = self.lstm(torch.cat([(past / scale).unsqueeze(-1), cov], -1))
        mu = F.softplus(self.mean(h)).squeeze(-1) * scale + 1e-4
        alpha = F.softplus(self.disp(h)).squeeze(-1) + 1e-4
        return mu, alpha

    def training_step(self, batch, _):
        past, cov, future, observed = batch
        mu, alpha = self(past, cov)
        d = NegativeBinomial(total_count=1 / alpha, logits=torch.log(mu * alpha))
        nll = -d.log_prob(future)
        loss = (nll * observed).sum() / torch.clamp(observed.sum(), min=1.0)
        self.log("train_nll", loss)
        return loss

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return {"optimizer": opt, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(opt, 0.97)}


def run(train_dl, val_dl, debug: bool = False):
    trainer = pl.Trainer(max_epochs=30, gradient_clip_val=10.0, detect_anomaly=debug)
    trainer.fit(DeepAR(n_cov=12), train_dl, val_dl)
