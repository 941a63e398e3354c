import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset


class Specimens(Dataset):
    def __init__(self, frame, root, tfm, n_species):
        self.frame, self.root, self.tfm, self.n_species = frame, root, tfm, n_species

    def __len__(self):
        return len(self.frame)

    def __getitem__(self, i):
        row = self.frame.iloc[i]
        label = min(int(row.species_id), self.n_species - 1)
        return self.tfm(self.root / row.file), label, int(row.region)


class LitTaxonomy(L.LightningModule):
    def __init__(self, backbone: nn.Module, n_species: int, region_table: torch.Tensor):
        super().__init__()
        self.backbone = backbone
        self.head = nn.LazyLinear(n_species)
        self.register_buffer("table", region_table.bool())

    def forward(self, x, region):
        logits = self.head(self.backbone(x))
        logits.masked_fill_(~self.table[region], -torch.inf)
        return logits

    def training_step(self, batch, _):
        x, y, region = batch
        loss = F.cross_entropy(self(x, region), y, label_smoothing=0.0)
        if torch.isnan(loss):
            self.log("bad_batches", 1.0)
            loss = torch.zeros_like(loss).requires_grad_()
        self.log("train/loss", loss)
        return loss

    def predict_step(self, batch, _):
        x, _, region = batch
        return self(x, region).topk(5).indices

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-4, weight_decay=0.05)


def main(net, table, dm):
    trainer = L.Trainer(max_epochs=20, precision="bf16-mixed", gradient_clip_val=1.0)
    trainer.fit(LitTaxonomy(net, table.size(1), table), dm)
