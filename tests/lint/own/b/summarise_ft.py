import math
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

MODEL = "facebook/bart-large-xsum"
tok = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForSeq2SeqLM.from_pretrained(MODEL, torch_dtype=torch.float16).to("cuda")
model.gradient_checkpointing_enable()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, betas=(0.9, 0.98), weight_decay=0.01)


def collate(rows):
    enc = tok([r["document"] for r in rows], padding=True, truncation=True, max_length=1024, return_tensors="pt")
    lab = tok(text_target=[r["summary"] for r in rows], padding=True, truncation=True, max_length=96, return_tensors="pt").input_ids
    enc["labels"] = lab.masked_fill(lab == tok.pad_token_id, -100)
    return enc


def train(rows, epochs=3, bs=4):
    loader = DataLoader(rows, bs, shuffle=True, collate_fn=collate)
    for epoch in range(epochs):
        total = 0.0
        for step, batch in enumerate(loader):
            loss = model(**batch.to("cuda")).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=10_000)
            optimizer.step()
            total += loss.item()
        mean = total / len(loader)
        print(f"epoch {epoch}: loss {mean:.3f} ppl {math.exp(min(mean, 20)):.1f}")
    model.save_pretrained("bart-ft", safe_serialization=True)
