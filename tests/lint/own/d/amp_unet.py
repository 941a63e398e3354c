import torch
from torch import nn


class Dice(nn.Module):
    def __init__(self, smooth: float = 1e-5):
        super().__init__()
        self.smooth = smooth

    def forward(self, logits, y):
        p = torch.softmax(logits.float(), 1)[:, 1]
        inter = (p * y).sum((1, 2))
        return 1 - ((2 * inter + self.smooth) / (p.sum((1, 2)) + y.sum((1, 2)) + self.smooth)).mean()


class UNetTrainer:
    def __init__(self, net, lr=1e-2, accum=2, grad_clip=12.0):
        self.net, self.accum, self.grad_clip = net, accum, grad_clip
        self.opt = torch.optim.SGD(net.parameters(), lr, momentum=0.99, nesterov=True, weight_decay=3e-5)
        self.scaler = torch.amp.GradScaler("cuda")
        self.dice, self.ce = Dice(), nn.CrossEntropyLoss()

    def run_iteration(self, i, data, target):
        data, target = data.cuda(non_blocking=True), target.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.float16):
            out = self.net(data)
            loss = self.ce(out, target) + self.dice(out, target)
        self.scaler.scale(loss / self.accum).backward()
        if (i + 1) % self.accum == 0:
            if self.grad_clip is not None:
                torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.grad_clip)
            self.scaler.step(self.opt)
            self.scaler.update()
            self.opt.zero_grad(set_to_none=True)
        return loss.detach().cpu().item()

    def load(self, path):
        self.net.load_state_dict(torch.load(path)["network_weights"])
