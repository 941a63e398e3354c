import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision


class Trainer:
    def __init__(self, model, lr=1e-4):
        mp = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        self.model = FSDP(model, mixed_precision=mp, device_id=torch.cuda.current_device())
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=(0.9, 0.95))
        self.history = []

    def train_step(self, batch):
        out = self.model(batch["input_ids"], labels=batch["labels"])
        loss = out.loss
        if not loss.isfinite():
            self.history.append(float("nan"))
            return None
        loss.backward()
        norm = self.model.clip_grad_norm_(1.0)
        self.opt.step()
        self.opt.zero_grad(set_to_none=True)
        self.history.append(loss.item())
        return norm

    def fit(self, loader, steps):
        for step, batch in zip(range(steps), loader):
            batch = {k: v.cuda() for k, v in batch.items()}
            self.train_step(batch)
            if dist.get_rank() == 0 and step % 10 == 0:
                print(f"step {step} loss {self.history[-1]:.4f}")

    def resume(self, path):
        state = torch.load(path, map_location="cpu")
        self.model.load_state_dict(state["model"])
