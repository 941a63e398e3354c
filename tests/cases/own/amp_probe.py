import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class DigitNet(nn.Module):
    def __init__(self, c=8, classes=5):
        super().__init__()
        self.conv1 = nn.Conv2d(1, c, 3, padding=1)
        self.conv2 = nn.Conv2d(c, c, 3, stride=2, padding=1)
        self.fc = nn.Linear(c * 16, classes)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        return self.fc(x.flatten(1))


def digits(n=96):
    g = torch.Generator().manual_seed(3)
    y = torch.randint(0, 5, (n,), generator=g)
    x = 0.3 * torch.randn(n, 1, 8, 8, generator=g)
    x[torch.arange(n), 0, y] += 1.0
    return TensorDataset(x, y)


def main():
    torch.manual_seed(0)
    model = DigitNet()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 23, backoff_factor=0.125)
    loader = DataLoader(digits(), batch_size=8)
    for step, (x, y) in enumerate(loader):
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(x)
        loss = F.cross_entropy(logits.float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale():.0f}")


if __name__ == "__main__":
    main()
