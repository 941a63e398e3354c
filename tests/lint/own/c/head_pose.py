import torch
from torch import nn
from torchvision.models import resnet18


def rot_to_euler(R: torch.Tensor) -> torch.Tensor:
    sy = torch.sqrt(R[:, 0, 0] ** 2 + R[:, 1, 0] ** 2)
    x = torch.atan2(R[:, 2, 1], R[:, 2, 2])
    y = torch.atan2(-R[:, 2, 0], sy)
    z = torch.atan2(R[:, 1, 0], R[:, 0, 0])
    return torch.stack([x, y, z], dim=-1)


def quat_pitch(q: torch.Tensor) -> torch.Tensor:
    w, x, y, z = nn.functional.normalize(q, dim=-1).unbind(-1)
    s = 2 * (w * y - z * x)
    return torch.asin(s.clamp(-1.0, 1.0))


def quat_yaw(q: torch.Tensor) -> torch.Tensor:
    w, x, y, z = nn.functional.normalize(q, dim=-1).unbind(-1)
    return torch.atan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z))


def rotvec_to_quat(v: torch.Tensor) -> torch.Tensor:
    theta = v.norm(dim=-1, keepdim=True)
    k = torch.where(theta > 1e-6, torch.sin(theta / 2) / theta, torch.full_like(theta, 0.5))
    return torch.cat([torch.cos(theta / 2), k * v], dim=-1)


class PoseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = resnet18(weights="DEFAULT")
        self.net.fc = nn.Linear(512, 3)

    def forward(self, img):
        return rotvec_to_quat(self.net(img))


def train(net, loader, opt):
    for img, pitch, yaw in loader:
        q = net(img.cuda())
        loss = (quat_pitch(q) - pitch.cuda()).abs().mean() + (1 - torch.cos(quat_yaw(q) - yaw.cuda())).mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        opt.step()
