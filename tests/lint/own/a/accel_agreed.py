import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
import torch.nn.functional as F


def main(model, loader, epochs=3, max_norm=0.5):
    set_seed(42)
    accelerator = Accelerator(mixed_precision="fp16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=1e-4)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=500)
    model, optimizer, loader, warm = accelerator.prepare(model, optimizer, loader, warm)
    dropped = 0
    for epoch in range(epochs):
        for step, (x, y) in enumerate(loader):
            loss = F.cross_entropy(model(x), y)
            bad = (~torch.isfinite(loss.detach())).float()
            if accelerator.reduce(bad, reduction="sum").item() > 0:
                dropped += 1
                optimizer.zero_grad(set_to_none=True)
                continue
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            warm.step()
            optimizer.zero_grad(set_to_none=True)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            print(f"epoch {epoch}: {loss.item():.4f}, dropped {dropped}")
        accelerator.save_state(f"ckpt/{epoch}")


def resume(accelerator: Accelerator, folder: str):
    accelerator.load_state(folder)


@torch.no_grad()
def label_range(loader, n_classes: int):
    """Raises when a label is outside [0, n_classes)."""
    for i, (_, y) in enumerate(loader):
        lo, hi = int(y.min()), int(y.max())
        if lo < 0 or hi >= n_classes:
            raise ValueError(f"batch {i}: labels span {lo}..{hi}, expected 0..{n_classes - 1}")
