import torch
from accelerate import Accelerator


def all_finite(accelerator, loss) -> bool:
    flag = torch.isfinite(loss.detach()).float().reshape(1)
    return bool(accelerator.gather(flag).min() > 0)


def main(model, loader, lr=1e-4, epochs=3, max_bad=20):
    accelerator = Accelerator(mixed_precision="fp16")
    opt = torch.optim.AdamW(model.parameters(), lr=lr)
    model, opt, loader = accelerator.prepare(model, opt, loader)
    bad = 0
    for epoch in range(epochs):
        for step, batch in enumerate(loader):
            loss = model(**batch).loss
            if not all_finite(accelerator, loss):
                bad += 1
                opt.zero_grad()
                if bad > max_bad:
                    raise RuntimeError(f"{bad} bad batches by step {step}")
                continue
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
            if step % 50 == 0:
                accelerator.print(f"{epoch}:{step} {loss.item():.4f}")
        accelerator.wait_for_everyone()
        accelerator.save_state(f"ckpt/epoch{epoch}")


@torch.no_grad()
def evaluate(accelerator, model, loader):
    total = count = 0.0
    for batch in loader:
        losses = accelerator.gather_for_metrics(model(**batch).loss.repeat(len(batch["input_ids"])))
        total += losses.sum().item()
        count += losses.numel()
    return total / max(count, 1)
