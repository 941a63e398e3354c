import os
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from folding.model import Evoformer
from folding.data import crops


def setup():
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    return local


def train_step(model, batch, optimizer):
    out = model(batch["msa"], batch["pair"])
    loss = out["distogram"] + 0.5 * out["masked_msa"]
    if not torch.isfinite(loss):
        optimizer.zero_grad()
        return None
    loss.backward()
    model.clip_grad_norm_(0.1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def main():
    local = setup()
    model = FSDP(Evoformer(c_m=256, c_z=128).cuda(local))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for i, batch in enumerate(crops("train", size=256)):
        value = train_step(model, batch, optimizer)
        if dist.get_rank() == 0 and i % 100 == 0:
            print(i, value)


if __name__ == "__main__":
    main()
