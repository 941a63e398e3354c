import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torchvision.ops import box_iou, sigmoid_focal_loss


class BoxCoder:
    def decode(self, deltas: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        wh = anchors[:, 2:] - anchors[:, :2]
        ctr = anchors[:, :2] + 0.5 * wh
        dxy, dwh = deltas.split(2, dim=-1)
        new_ctr = ctr + dxy * wh
        new_wh = wh * torch.exp(dwh)
        return torch.cat([new_ctr - 0.5 * new_wh, new_ctr + 0.5 * new_wh], -1)

    def clip(self, boxes, h: int, w: int):
        boxes[..., 0::2].clamp_(0, w)
        boxes[..., 1::2].clamp_(0, h)
        return boxes


class LitDetector(pl.LightningModule):
    def __init__(self, net, lr: float = 1e-4):
        super().__init__()
        self.net, self.lr = net, lr
        self.coder = BoxCoder()

    def training_step(self, batch, batch_idx):
        images, anchors, cls_t, box_t, fg = batch
        cls, deltas = self.net(images)
        n_fg = max(int(fg.sum()), 1)
        cls_loss = sigmoid_focal_loss(cls, cls_t, reduction="sum") / n_fg
        boxes = self.coder.decode(deltas[fg], anchors[fg])
        box_loss = F.smooth_l1_loss(boxes, box_t[fg], reduction="sum") / n_fg
        loss = cls_loss + box_loss
        if not torch.isfinite(loss):
            self.log("train/skipped", 1.0)
            return None
        self.log_dict({"cls": cls_loss, "box": box_loss})
        return loss

    @torch.no_grad()
    def match_quality(self, boxes, gt):
        return box_iou(boxes, gt).amax(-1).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def run(net, dm):
    trainer = pl.Trainer(accelerator="gpu", devices=8, strategy="ddp", max_epochs=36, gradient_clip_val=10.0)
    trainer.fit(LitDetector(net), datamodule=dm)
