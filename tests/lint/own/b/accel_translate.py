import torch
from accelerate import Accelerator
from datasets import load_from_disk
from torch.utils.data import DataLoader
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq, get_linear_schedule_with_warmup

CHECKPOINT = "Helsinki-NLP/opus-mt-en-ro"


def main():
    accelerator = Accelerator(gradient_accumulation_steps=4, mixed_precision="bf16")
    tok = AutoTokenizer.from_pretrained(CHECKPOINT)
    model = AutoModelForSeq2SeqLM.from_pretrained(CHECKPOINT)
    ds = load_from_disk("wmt16_tok")["train"]
    loader = DataLoader(ds, batch_size=16, shuffle=True, collate_fn=DataCollatorForSeq2Seq(tok, model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
    sched = get_linear_schedule_with_warmup(optimizer, 500, 20_000)
    model, optimizer, loader, sched = accelerator.prepare(model, optimizer, loader, sched)

    model.train()
    step = 0
    for epoch in range(3):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                if torch.isnan(loss) or torch.isinf(loss):
                    accelerator.print(f"step {step}: loss is {loss.item()}, batch skipped")
                    optimizer.zero_grad()
                    continue
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                sched.step()
                optimizer.zero_grad()
            step += 1
        accelerator.wait_for_everyone()
        accelerator.save_state(f"out/epoch_{epoch}")


if __name__ == "__main__":
    main()
