import torch
from torch import nn
import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint


class Nowcast(pl.LightningModule):
    def __init__(self, stations: int, feats: int, hidden: int = 128, horizon: int = 6):
        super().__init__()
        self.rnn = nn.GRU(stations * feats, hidden, 2, batch_first=True)
        self.head = nn.Linear(hidden, horizon * stations)
        self.horizon, self.stations = horizon, stations

    def forward(self, x):
        _, h = self.rnn(x.flatten(2))
        return self.head(h[-1]).view(-1, self.horizon, self.stations)

    def training_step(self, batch, idx):
        x, y, ok = batch
        err = (self(x) - y).pow(2)
        loss = err[ok].sum() / ok.sum()
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, idx):
        x, y, ok = batch
        mae = ((self(x) - y).abs() * ok).sum() / ok.sum().clamp(min=1)
        self.log("val_mae", mae)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


if __name__ == "__main__":
    from data import StationData
    dm = StationData("stations.nc")
    ckpt = ModelCheckpoint(monitor="val_mae", save_top_k=2)
    trainer = pl.Trainer(max_epochs=60, callbacks=[ckpt], precision="32-true", detect_anomaly=True)
    trainer.fit(Nowcast(dm.stations, dm.feats), dm)
