import torch
from torch import inf


def grad_norm(parameters, p: float = 2.0) -> torch.Tensor:
    grads = [q.grad.detach() for q in parameters if q.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    if p == inf:
        return max(g.abs().max() for g in grads)
    return torch.norm(torch.stack([g.norm(p) for g in grads]), p)


class NativeScaler:
    state_dict_key = "amp_scaler"

    def __init__(self, device: str = "cuda"):
        self._scaler = torch.amp.GradScaler(device)

    def __call__(self, loss, optimizer, parameters, clip_grad=None, create_graph=False, update=True):
        self._scaler.scale(loss).backward(create_graph=create_graph)
        if not update:
            return None
        parameters = list(parameters)
        self._scaler.unscale_(optimizer)
        if clip_grad is not None:
            norm = torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
        else:
            norm = grad_norm(parameters)
        self._scaler.step(optimizer)
        self._scaler.update()
        return norm

    def state_dict(self):
        return self._scaler.state_dict()

    def load_state_dict(self, sd):
        self._scaler.load_state_dict(sd)


def run_epoch(model, loader, optimizer, criterion, loss_scaler: NativeScaler, clip=3.0):
    for x, y in loader:
        with torch.autocast("cuda"):
            out = model(x.cuda())
            loss = criterion(out, y.cuda())
        norm = loss_scaler(loss, optimizer, model.parameters(), clip_grad=clip)
        optimizer.zero_grad()
        yield loss.item(), float(norm)
