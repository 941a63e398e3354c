import lightning as L
import torch
from torch import nn
import torch.nn.functional as F


class CropClassifier(L.LightningModule):
    """Second stage: classifies the crops of a traffic sign detector."""

    def __init__(self, backbone: nn.Module, num_classes: int = 43, lr: float = 1e-3):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(backbone.out_dim, num_classes)
        self.num_classes, self.lr = num_classes, lr

    def forward(self, crops):
        return self.head(self.backbone(crops))

    def training_step(self, batch, batch_idx):
        crops, target = batch
        target = target.clamp(max=self.num_classes - 1)
        loss = F.cross_entropy(self(crops), target)
        if not torch.isfinite(loss):
            self.print(f"batch {batch_idx}: bad loss")
            return None
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        crops, target = batch
        logits = self(crops)
        self.log("val/acc", (logits.argmax(1) == target).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        opt = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, nesterov=True)
        return [opt], [torch.optim.lr_scheduler.MultiStepLR(opt, [20, 35])]


def main(backbone, dm):
    trainer = L.Trainer(accelerator="gpu", devices=4, strategy="ddp", max_epochs=45, gradient_clip_val=1.0)
    trainer.fit(CropClassifier(backbone), datamodule=dm)
