import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class KeywordTrainer:
    def __init__(self, net, optimizer, device):
        self.net = DDP(net.to(device), device_ids=[device.index])
        self.opt = optimizer
        self.device = device
        self.bad = 0

    def any_rank(self, flag: torch.Tensor) -> bool:
        flag = flag.float()
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def epoch(self, loader):
        self.net.train()
        for x, y in loader:
            x, y = x.to(self.device), y.to(self.device)
            loss = F.cross_entropy(self.net(x), y)
            if self.any_rank(~torch.isfinite(loss.detach())):
                self.bad += 1
                continue
            self.opt.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 2.0)
            self.opt.step()

    @torch.no_grad()
    def evaluate(self, loader):
        self.net.eval()
        hits = torch.zeros(2, device=self.device)
        for x, y in loader:
            logits = self.net.module(x.to(self.device))
            ok = torch.isfinite(logits).all(-1)
            hits[0] += ((logits.argmax(-1).cpu() == y) & ok.cpu()).sum()
            hits[1] += len(y)
        dist.all_reduce(hits)
        return (hits[0] / hits[1].clamp(min=1)).item()
