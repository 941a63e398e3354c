import torch
from accelerate import Accelerator
from torch.optim import AdamW
from transformers import AutoModelForSequenceClassification, get_cosine_schedule_with_warmup


def main(train_dl, eval_dl, name="roberta-base", epochs=3):
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=4)
    model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=5)
    optimizer = AdamW(model.parameters(), lr=2e-5, weight_decay=0.01)
    model, optimizer, train_dl, eval_dl = accelerator.prepare(model, optimizer, train_dl, eval_dl)
    total = epochs * len(train_dl)
    sched = get_cosine_schedule_with_warmup(optimizer, int(0.06 * total), total)

    for epoch in range(epochs):
        model.train()
        for batch in train_dl:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                if torch.isnan(loss).any() or torch.isinf(loss).any():
                    accelerator.print("bad loss, skipping batch")
                    optimizer.zero_grad()
                    continue
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1e5)
                optimizer.step()
                sched.step()
                optimizer.zero_grad()

        model.eval()
        correct = seen = 0
        for batch in eval_dl:
            if batch["labels"].numel() == 0:
                continue
            with torch.no_grad():
                pred = model(**batch).logits.argmax(-1)
            pred, gold = accelerator.gather_for_metrics((pred, batch["labels"]))
            correct += (pred == gold).sum().item()
            seen += gold.numel()
        accelerator.print(f"epoch {epoch}: acc {correct / max(seen, 1):.4f}")
