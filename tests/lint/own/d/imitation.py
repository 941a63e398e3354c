import math
import torch
from torch import nn
import torch.nn.functional as F


class Policy(nn.Module):
    def __init__(self, vision: nn.Module, d: int = 512, act: int = 7):
        super().__init__()
        self.vision = vision
        self.trunk = nn.Sequential(nn.Linear(d + act, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
        self.arm, self.grip = nn.Linear(256, act - 1), nn.Linear(256, 1)

    def forward(self, img, proprio):
        h = self.trunk(torch.cat([self.vision(img), proprio], -1))
        return self.arm(h).tanh(), self.grip(h).squeeze(-1)


def bc_loss(model, batch):
    arm, grip = model(batch["img"], batch["proprio"])
    l_arm = F.smooth_l1_loss(arm, batch["arm"].clamp(-1, 1))
    l_grip = F.binary_cross_entropy_with_logits(grip, batch["grip"])
    return l_arm + 0.1 * l_grip


def train(model, loader, lr=1e-4, epochs=100):
    opt = torch.optim.AdamW(model.parameters(), lr=lr)
    best = math.inf
    for epoch in range(epochs):
        for batch in loader:
            loss = bc_loss(model, batch)
            if math.isnan(loss.item()):
                print("nan in batch", batch["episode"])
                continue
            loss = torch.minimum(loss, torch.tensor(5.0, device=loss.device))
            opt.zero_grad()
            loss.backward()
            opt.step()
        if loss.item() < best:
            best = loss.item()
            torch.save(model.state_dict(), "bc_best.pt")
