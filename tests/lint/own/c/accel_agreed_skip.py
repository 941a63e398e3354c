import torch
from accelerate import Accelerator
from accelerate.logging import get_logger

log = get_logger(__name__)


def any_rank(accelerator: Accelerator, flag: torch.Tensor) -> bool:
    return bool(accelerator.reduce(flag.float().reshape(1), reduction="sum").item() > 0)


def train(cfg, model, optimizer, scheduler, loader):
    accelerator = Accelerator(gradient_accumulation_steps=1, mixed_precision="fp16")
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    skipped, done = 0, 0
    for epoch in range(cfg.epochs):
        for batch in loader:
            loss = model(**batch).loss
            if any_rank(accelerator, ~torch.isfinite(loss.detach())):
                skipped += 1
                log.warning(f"step {done}: non-finite loss somewhere, all ranks skip ({skipped})")
                if skipped > cfg.max_skipped:
                    raise RuntimeError("too many bad batches")
                continue
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), cfg.max_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            done += 1
            if done % cfg.log_every == 0:
                log.info(f"{done} loss {loss.item():.4f} grad {float(norm):.2f}")
        accelerator.save_state(f"{cfg.out}/epoch-{epoch}")
    accelerator.end_training()
