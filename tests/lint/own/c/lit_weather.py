import lightning as L
import torch
import torch.nn.functional as F
from torch import nn


class WeatherNet(L.LightningModule):
    def __init__(self, n_var: int = 69, width: int = 256, lr: float = 5e-4):
        super().__init__()
        self.save_hyperparameters()
        self.stem = nn.Conv2d(n_var, width, 7, padding=3, padding_mode="circular")
        self.blocks = nn.Sequential(*[nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1)) for _ in range(12)])
        self.out = nn.Conv2d(width, n_var, 1)
        lat = torch.deg2rad(torch.linspace(-90, 90, 121))
        w = torch.cos(lat).clamp(min=0)
        self.register_buffer("area", (w / w.mean()).view(1, 1, -1, 1))

    def forward(self, x):
        return x + self.out(self.blocks(self.stem(x)))

    def training_step(self, batch, idx):
        now, later = batch
        loss = (self.area * F.mse_loss(self(now), later, reduction="none")).mean()
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def on_after_backward(self):
        for name, p in self.named_parameters():
            if p.grad is not None and not torch.isfinite(p.grad).all():
                self.print(f"zeroing gradient of {name}")
                p.grad = torch.zeros_like(p.grad)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.1)
        return [opt], [torch.optim.lr_scheduler.CosineAnnealingLR(opt, 100)]


def main(dm):
    trainer = L.Trainer(max_epochs=100, precision="bf16-mixed", gradient_clip_val=1.0)
    trainer.fit(WeatherNet(), dm)
