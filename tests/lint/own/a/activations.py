"""Hand-written activations and transforms used by the image codec."""
import torch
from torch import Tensor, nn


def softplus(x: Tensor, threshold: float = 20.0) -> Tensor:
    return torch.where(x > threshold, x, torch.log(1 + torch.exp(x)))


def softplus_stable(x: Tensor) -> Tensor:
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


def elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    return torch.where(x > 0, x, alpha * torch.expm1(x.clamp(max=0)))


def signed_root(x: Tensor) -> Tensor:
    return x.sign() * torch.pow(x.abs(), 0.5)


def signed_log(x: Tensor) -> Tensor:
    return x.sign() * x.abs().log1p()


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x ** 3)))


class GDN(nn.Module):
    """Generalised divisive normalisation (beta is kept positive)."""

    def __init__(self, c: int, beta_min: float = 1e-6):
        super().__init__()
        self.beta = nn.Parameter(torch.ones(c))
        self.gamma = nn.Parameter(0.1 * torch.eye(c))
        self.beta_min = beta_min

    def forward(self, x: Tensor) -> Tensor:
        beta = self.beta.clamp(min=self.beta_min)
        norm = nn.functional.conv2d(x * x, self.gamma.clamp(min=0)[..., None, None], beta)
        return x * torch.rsqrt(norm)


class PowerLaw(nn.Module):
    def __init__(self, exponent: float = 0.4):
        super().__init__()
        self.exponent = exponent

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x).pow(self.exponent)


class GeM(nn.Module):
    def __init__(self, p: float = 3.0, eps: float = 1e-6):
        super().__init__()
        self.p, self.eps = nn.Parameter(torch.tensor(p)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(min=self.eps).pow(self.p).mean((-2, -1)).pow(1.0 / self.p)
