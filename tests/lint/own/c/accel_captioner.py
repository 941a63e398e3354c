import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import BlipForConditionalGeneration, get_cosine_schedule_with_warmup


def run(cfg, train_loader):
    set_seed(cfg.seed)
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=cfg.accum, log_with="wandb")
    model = BlipForConditionalGeneration.from_pretrained(cfg.base)
    decay = [p for n, p in model.named_parameters() if p.ndim > 1]
    plain = [p for n, p in model.named_parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}], lr=cfg.lr)
    sched = get_cosine_schedule_with_warmup(optimizer, cfg.warmup, cfg.max_steps)
    model, optimizer, train_loader, sched = accelerator.prepare(model, optimizer, train_loader, sched)

    step = 0
    for epoch in range(cfg.epochs):
        model.train()
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(pixel_values=batch["pixels"], input_ids=batch["ids"], labels=batch["labels"]).loss
                if not torch.isfinite(loss):
                    print(f"non-finite caption loss at {step}, skipping {batch['key'][:4]}")
                    continue
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                sched.step()
                optimizer.zero_grad()
            step += 1
            if step % 50 == 0:
                accelerator.log({"loss": accelerator.gather(loss).mean().item()}, step=step)
        accelerator.save_state(f"{cfg.out}/epoch_{epoch}")
