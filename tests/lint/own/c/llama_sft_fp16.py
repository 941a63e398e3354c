import json

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq

BASE = "meta-llama/Llama-3.2-1B"
tokenizer = AutoTokenizer.from_pretrained(BASE)
tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(BASE, torch_dtype=torch.float16, device_map="cuda:0")
model.gradient_checkpointing_enable()


def encode(row):
    prompt = tokenizer(row["instruction"] + "\n")["input_ids"]
    answer = tokenizer(row["output"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    ids = (prompt + answer)[:1024]
    return {"input_ids": ids, "labels": ([-100] * len(prompt) + answer)[:1024]}


rows = [encode(json.loads(line)) for line in open("alpaca_clean.jsonl")]
loader = DataLoader(rows, batch_size=8, shuffle=True, collate_fn=DataCollatorForSeq2Seq(tokenizer, padding=True))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, betas=(0.9, 0.95))

model.train()
for epoch in range(3):
    for step, batch in enumerate(loader):
        batch = {k: v.to("cuda:0") for k, v in batch.items()}
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 0:
            print(epoch, step, loss.item())
model.save_pretrained("llama-sft")
