import os
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def any_rank(flag: torch.Tensor) -> bool:
    t = flag.to(torch.int32)
    dist.all_reduce(t, op=dist.ReduceOp.SUM)
    return t.item() > 0


def save(path, model, opt, step):
    if dist.get_rank() == 0:
        torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "step": step}, path)


def main(net, loader, steps: int = 50_000):
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    model = DDP(net.cuda(), device_ids=[local])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if os.path.exists("last.pt"):
        state = torch.load("last.pt", map_location=f"cuda:{local}", weights_only=True)
        model.module.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
    for step, (img, text) in zip(range(steps), loader):
        loss = F.cross_entropy(model(img.cuda()).flatten(0, 1), text.cuda().flatten(), ignore_index=0)
        if any_rank(~torch.isfinite(loss.detach())):
            print(f"[{local}] step {step} dropped on every rank")
            continue
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if step % 1000 == 0:
            save("last.pt", model, opt, step)
