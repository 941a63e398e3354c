import copy
import torch
import torch.nn.functional as F
from torch import nn


def magnitude_masks(net: nn.Module, sparsity: float) -> dict[str, torch.Tensor]:
    masks = {}
    for name, p in net.named_parameters():
        if p.dim() < 2:
            continue
        k = max(1, int(p.numel() * sparsity))
        cut = p.detach().abs().flatten().kthvalue(k).values
        masks[name] = (p.detach().abs() > cut).float()
    return masks


@torch.no_grad()
def apply_masks(net, masks):
    for name, p in net.named_parameters():
        if name in masks:
            p.mul_(masks[name])


def train(net, masks, loader, epochs=10, lr=0.1):
    opt = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    for _ in range(epochs):
        for x, y in loader:
            loss = F.cross_entropy(net(x), y)
            opt.zero_grad()
            loss.backward()
            # pruned weights stay at zero
            for name, p in net.named_parameters():
                if name in masks:
                    p.grad[masks[name] == 0] = 0.0
            opt.step()
    apply_masks(net, masks)


def lottery(net, loader, rounds=5, rate=0.2, init_path="init.pt"):
    torch.save(net.state_dict(), init_path)
    alive, history = 1.0, []
    for r in range(rounds):
        train(net, magnitude_masks(net, 1 - alive) if r else {}, loader)
        history.append(copy.deepcopy(net.state_dict()))
        alive *= 1 - rate
        masks = magnitude_masks(net, 1 - alive)
        net.load_state_dict(torch.load(init_path, weights_only=True))
        apply_masks(net, masks)
        print(f"round {r}: {alive:.1%} of the weights left")
    return history
