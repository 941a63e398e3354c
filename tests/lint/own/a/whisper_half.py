import torch
from torch import nn
import torch.nn.functional as F


class SpeakerNet(nn.Module):
    def __init__(self, n_mels=80, d=192, n_spk=5994):
        super().__init__()
        self.tdnn = nn.Sequential(nn.Conv1d(n_mels, 512, 5, padding=2), nn.ReLU(), nn.Conv1d(512, 512, 3, padding=1))
        self.att = nn.Conv1d(512, 512, 1)
        self.emb = nn.Linear(1024, d)
        self.cls = nn.Linear(d, n_spk)

    def forward(self, mel):
        h = self.tdnn(mel)
        w = self.att(h).softmax(-1)
        mu = (w * h).sum(-1)
        var = (w * h * h).sum(-1) - mu * mu
        sd = var.float().clamp(min=1e-6).sqrt().to(h.dtype)
        e = self.emb(torch.cat([mu, sd], 1))
        return e, self.cls(e)


def log_prob16(logits):
    p = F.softmax(logits.half(), dim=-1)
    return p.clamp(min=1e-10).log()


def scores(e1, e2, eps=1e-3):
    e1, e2 = e1.half(), e2.half()
    return (e1 * e2).sum(-1) / (e1.norm(dim=-1) * e2.norm(dim=-1) + eps)


def cohort_norm(score, cohort):
    """cohort: list of 1-D score tensors, one per enrolled speaker."""
    return torch.stack([(score - c.mean()) / c.std().clamp(min=1e-4) for c in cohort])


class HalfTrainer:
    def __init__(self, net: SpeakerNet, lr=1e-3):
        self.net = net.cuda()
        self.net.half()
        self.opt = torch.optim.NAdam(params=self.net.parameters(), lr=lr)

    def step(self, mel, spk):
        _, logits = self.net(mel.cuda().half())
        loss = F.cross_entropy(logits.float(), spk.cuda())
        self.opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 3.0)
        self.opt.step()
        return loss.item()
