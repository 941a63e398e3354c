import torch
from torch import Tensor, nn
import torch.nn.functional as F

NEG_INF = float("-inf")


class ActionHead(nn.Module):
    def __init__(self, d: int, n_actions: int):
        super().__init__()
        self.fc = nn.Linear(d, n_actions)
        self.ce = nn.CrossEntropyLoss()

    def masked(self, h: Tensor, legal: Tensor) -> Tensor:
        logits = self.fc(h)
        return torch.where(legal, logits, torch.full_like(logits, NEG_INF))

    def imitation_loss(self, h: Tensor, legal: Tensor, expert: Tensor) -> Tensor:
        return self.ce(self.masked(h, legal), expert)

    def probs(self, h: Tensor, legal: Tensor) -> Tensor:
        logits = self.masked(h, legal)
        nothing = logits.isinf().all().item()
        if nothing:
            return torch.ones_like(logits) / logits.size(-1)
        return logits.softmax(-1)

    @torch.no_grad()
    def greedy(self, h: Tensor, legal: Tensor) -> Tensor:
        return self.masked(h, legal).argmax(-1)


class SafeActionHead(ActionHead):
    def imitation_loss(self, h, legal, expert):
        ok = legal.gather(1, expert[:, None]).squeeze(1)
        if not ok.all():
            raise ValueError(f"{int((~ok).sum())} expert actions are illegal")
        logits = self.fc(h).masked_fill(~legal, -1e4)
        return self.ce(logits, expert)


def policy_entropy(p: Tensor) -> Tensor:
    return -(p * torch.log(p.clamp(min=1e-8))).sum(-1).mean()


def soft_targets(logits: Tensor, teacher: Tensor, tau: float = 2.0) -> Tensor:
    student = F.softmax(logits / tau, dim=-1)
    return -(F.softmax(teacher / tau, dim=-1) * student.log()).sum(-1).mean()
