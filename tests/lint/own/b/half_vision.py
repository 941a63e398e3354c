import math
import timm
import torch
from torch import nn

device = torch.device("cuda")
net = timm.create_model("convnext_tiny", num_classes=120, pretrained=True)
net = net.to(device, dtype=torch.float16)
opt = torch.optim.Adam(net.parameters(), lr=5e-5, eps=1e-8)
crit = nn.CrossEntropyLoss()


def warmup(step, steps=500):
    return min(1.0, (step + 1) / steps)


sched = torch.optim.lr_scheduler.LambdaLR(opt, warmup)


def fit(loader, epochs=10):
    step = 0
    for epoch in range(epochs):
        for img, breed in loader:
            logits = net(img.to(device, torch.float16))
            loss = crit(logits.float(), breed.to(device))
            if math.isnan(loss.item()):
                print(f"nan at step {step}, stopping")
                return
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            step += 1
        print(f"epoch {epoch} loss {loss.item():.4f}")


@torch.no_grad()
def top1(loader):
    net.eval()
    hit = n = 0
    for img, breed in loader:
        pred = net(img.to(device, torch.float16)).argmax(1).cpu()
        hit += (pred == breed).sum().item()
        n += len(breed)
    return hit / max(n, 1)
