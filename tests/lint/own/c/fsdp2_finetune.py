import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
import torch.nn.functional as F


def shard(model, mesh):
    mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.layers:
        fully_shard(block, mesh=mesh, mp_policy=mp)
    return fully_shard(model, mesh=mesh, mp_policy=mp)


def train(model, loader, cfg, mesh):
    model = shard(model, mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for step, (ids, labels) in enumerate(loader):
        ids, labels = ids.cuda(), labels.cuda()
        n_tok = (labels != -100).sum()
        dist.all_reduce(n_tok)
        logits = model(ids).float()
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        loss = total / n_tok.clamp(min=1) * dist.get_world_size()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.max_norm)
        # the norm is a global one, so every rank takes the same branch
        if torch.isfinite(norm):
            opt.step()
        elif dist.get_rank() == 0:
            print(f"step {step}: gradient norm {norm.item()}, no update")
        opt.zero_grad(set_to_none=True)
        if step % cfg.save_every == 0 and step > 0:
            msd, osd = get_state_dict(model, opt)
            dcp.save({"model": msd, "optim": osd}, checkpoint_id=f"{cfg.out}/step-{step}")
