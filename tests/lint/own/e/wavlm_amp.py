import torch
from torch import nn
from torch.amp import GradScaler, autocast


class EmotionHead(nn.Module):
    def __init__(self, encoder: nn.Module, width: int = 768, classes: int = 7):
        super().__init__()
        self.encoder = encoder
        self.proj = nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, classes))

    def forward(self, wav):
        return self.proj(self.encoder(wav).mean(1))


def train(model, loader, epochs=10, accum=4):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
    scaler = GradScaler("cuda")
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for epoch in range(epochs):
        optimizer.zero_grad()
        for i, (wav, y) in enumerate(loader):
            with autocast("cuda", dtype=torch.float16):
                loss = criterion(model(wav.cuda()), y.cuda()) / accum
            scaler.scale(loss).backward()
            if (i + 1) % accum == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        print(f"epoch {epoch} loss {loss.item() * accum:.4f}")
