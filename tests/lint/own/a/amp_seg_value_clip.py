import torch as th
from torch import nn
from torch.cuda.amp import GradScaler, autocast
from torch.nn import functional as nnf


class SoftDice(nn.Module):
    def forward(self, logits, onehot):
        prob = logits.softmax(1)
        inter = (prob * onehot).sum((2, 3))
        card = prob.sum((2, 3)) + onehot.sum((2, 3))
        dice = 2.0 * inter / card + 1e-6
        return 1.0 - dice.mean()


class SegRunner:
    def __init__(self, net, n_classes, lr=1e-3):
        self.net = net.cuda()
        self.k = n_classes
        self.optim = th.optim.SGD(net.parameters(), lr=lr, momentum=0.9, nesterov=True)
        self.grad_scaler = GradScaler(init_scale=2.0 ** 12)
        self.dice = SoftDice()

    def losses(self, img, lab):
        logits = self.net(img).float()
        ce = nnf.cross_entropy(logits, lab, ignore_index=255)
        onehot = nnf.one_hot(lab.masked_fill(lab == 255, 0), self.k).permute(0, 3, 1, 2)
        return ce, self.dice(logits, onehot.float())

    def step(self, img, lab):
        with autocast():
            ce, dice = self.losses(img.cuda(), lab.cuda())
            loss = ce + dice
        self.optim.zero_grad(set_to_none=True)
        self.grad_scaler.scale(loss).backward()
        nn.utils.clip_grad_value_(self.net.parameters(), clip_value=0.5)
        self.grad_scaler.unscale_(self.optim)
        self.grad_scaler.step(self.optim)
        self.grad_scaler.update()
        return {"ce": ce.item(), "dice": dice.item()}

    @th.inference_mode()
    def miou(self, pred, lab):
        ious = []
        for c in range(self.k):
            p, t = pred == c, lab == c
            union = (p | t).sum().item()
            if union:
                ious.append((p & t).sum().item() / union)
        return sum(ious) / max(len(ious), 1)
