import torch
from accelerate import Accelerator
from transformers import AutoModelForSeq2SeqLM, get_scheduler


def main(train_loader, epochs=3, lr=3e-4):
    accelerator = Accelerator(gradient_accumulation_steps=4, mixed_precision="bf16")
    model = AutoModelForSeq2SeqLM.from_pretrained("t5-base")
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    model, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)
    sched = get_scheduler("linear", optimizer, 500, epochs * len(train_loader))
    nan_count = 0
    for epoch in range(epochs):
        model.train()
        for step, batch in enumerate(train_loader):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                if torch.isnan(loss) or torch.isinf(loss):
                    nan_count += 1
                    optimizer.zero_grad()
                    continue
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                sched.step()
                optimizer.zero_grad()
            if accelerator.is_main_process and step % 100 == 0:
                accelerator.print(f"{epoch}/{step} {loss.item():.4f} skipped={nan_count}")
    accelerator.unwrap_model(model).save_pretrained("t5-summarizer")
