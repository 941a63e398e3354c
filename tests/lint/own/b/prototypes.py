import torch
import torch.nn.functional as F
from torch import Tensor


def class_means(f: Tensor, y: Tensor, n: int) -> Tensor:
    onehot = F.one_hot(y, n).type_as(f)
    total, count = onehot.t() @ f, onehot.sum(0).unsqueeze(1)
    return torch.where(count > 0, total / count, torch.zeros_like(total))


def class_means_safe(f: Tensor, y: Tensor, n: int) -> Tensor:
    onehot = F.one_hot(y, n).type_as(f)
    return (onehot.t() @ f) / onehot.sum(0).clamp(min=1).unsqueeze(1)


def whiten(support: Tensor, y: Tensor, query: Tensor) -> list[Tensor]:
    """Mahalanobis-like scaling by the spread of each class's shots."""
    out = []
    for c in y.unique():
        shots = support[y == c]
        spread = shots.std(dim=0)
        out.append((query - shots.mean(0)) / (spread + 1e-5))
    return out


def episode(encoder, xs, ys, xq, yq, n_way: int, tau: float = 0.1):
    proto = F.normalize(class_means_safe(encoder(xs), ys, n_way), dim=-1)
    q = F.normalize(encoder(xq), dim=-1)
    logits = q @ proto.t() / tau
    return F.cross_entropy(logits, yq), (logits.argmax(1) == yq).float().mean()


def meta_train(encoder, sampler, opt, episodes=20_000, n_way=5):
    for i in range(episodes):
        loss, acc = episode(encoder, *sampler(), n_way)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if i % 500 == 0:
            print(f"{i} loss {loss.item():.3f} acc {acc.item():.3f}")
