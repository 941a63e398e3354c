import argparse

import pytorch_lightning as pl
import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self, d, depth):
        super().__init__()
        layer = nn.TransformerEncoderLayer(d, 8, 4 * d, batch_first=True)
        self.body = nn.TransformerEncoder(layer, depth)
        self.body.layers[0].register_forward_hook(lambda mod, args, out: torch.nan_to_num(out))

    def forward(self, x, pad):
        return self.body(x, src_key_padding_mask=pad)


class LitEncoder(pl.LightningModule):
    def __init__(self, d=512, depth=6, lr=1e-4):
        super().__init__()
        self.net = Encoder(d, depth).half()
        self.head = nn.Linear(d, 2).half()
        self.lr = lr

    def forward(self, x, pad):
        h = self.net(x.half(), pad)
        h = torch.nan_to_num(h.masked_fill(pad.unsqueeze(-1), 0.0), nan=0.0)
        n = (~pad).sum(1, keepdim=True).clamp(min=1)
        return self.head((h.float().sum(1) / n).half())

    def training_step(self, batch, i):
        x, pad, y = batch
        loss = nn.functional.cross_entropy(self(x, pad).float(), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.lr, betas=(0.9, 0.999))
        return {"optimizer": opt, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(opt, 100)}


def main(dm):
    ap = argparse.ArgumentParser()
    ap.add_argument("--anomaly", action="store_true")
    args = ap.parse_args()
    trainer = pl.Trainer(max_epochs=10, devices=1, gradient_clip_val=1.0, detect_anomaly=args.anomaly)
    trainer.fit(LitEncoder(), dm)
