import torch
import torch.nn.functional as F

from .model import Bert


def build(device):
    model = Bert().to(device=device, dtype=torch.float16)
    no_decay = [p for n, p in model.named_parameters() if "bias" in n or "norm" in n]
    decay = [p for n, p in model.named_parameters() if not ("bias" in n or "norm" in n)]
    groups = [{"params": decay, "weight_decay": 0.01}, {"params": no_decay, "weight_decay": 0.0}]
    opt = torch.optim.Adam(groups, lr=1e-4)
    return model, opt


def mlm_loss(model, ids, mask, labels):
    h = model(ids, mask)
    logits = h @ model.emb.weight.t()
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100)


def run(loader, device, steps=100_000):
    model, opt = build(device)
    for step, (ids, mask, labels) in zip(range(steps), loader):
        loss = mlm_loss(model, ids.to(device), mask.to(device), labels.to(device))
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if step % 5000 == 0:
            torch.save(model.state_dict(), f"bert_{step}.pt")
