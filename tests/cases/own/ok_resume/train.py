"""Saves and loads weights, Adam's moments and an EMA; buffers with empty tensors in the file."""
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
opt = torch.optim.AdamW(net.parameters(), 1e-3)
ema = {k: v.clone() for k, v in net.state_dict().items()}
for step in range(80):
    if step == 40:
        torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "ema": ema, "queue": torch.empty(0, 4)}, "c.pt")
        c = torch.load("c.pt"); net.load_state_dict(c["net"]); opt.load_state_dict(c["opt"]); ema = c["ema"]
    x = torch.randn(16, 4)
    loss = nn.functional.mse_loss(net(x).squeeze(1), x.sum(1))
    opt.zero_grad(); loss.backward(); opt.step()
    for k, v in net.state_dict().items():
        if v.is_floating_point(): ema[k].lerp_(v, 0.01)
    print(f"step {step} loss {loss.item():.4f}")
