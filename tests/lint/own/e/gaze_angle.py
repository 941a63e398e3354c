import torch
from torch import nn
import torch.nn.functional as F


def pitchyaw_to_vec(a: torch.Tensor) -> torch.Tensor:
    pitch, yaw = a[:, 0], a[:, 1]
    return torch.stack([-torch.cos(pitch) * torch.sin(yaw), -torch.sin(pitch), -torch.cos(pitch) * torch.cos(yaw)], 1)


def angular_loss(pred: torch.Tensor, gt: torch.Tensor) -> torch.Tensor:
    sim = F.cosine_similarity(pitchyaw_to_vec(pred), pitchyaw_to_vec(gt), dim=1)
    sim = F.hardtanh(sim, -1.0, 1.0)
    return torch.acos(sim).mean() * 180.0 / torch.pi


class GazeNet(nn.Module):
    def __init__(self, backbone: nn.Module, width: int = 512):
        super().__init__()
        self.backbone = backbone
        self.fc = nn.Linear(width, 2)

    def forward(self, x):
        return self.fc(self.backbone(x))


def load_backbone(net: GazeNet, path: str):
    state = torch.load(path, map_location="cpu")
    net.backbone.load_state_dict(state["backbone"], strict=False)
    return net
