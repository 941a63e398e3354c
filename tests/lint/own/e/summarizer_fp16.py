import torch
from torch import nn
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

MODEL = "facebook/bart-base"


def build(device="cuda"):
    tok = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForSeq2SeqLM.from_pretrained(MODEL, torch_dtype=torch.float16).to(device)
    return tok, model


def train(pairs, epochs=3, device="cuda"):
    tok, model = build(device)
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-5, eps=1e-8)
    for epoch in range(epochs):
        for i in range(0, len(pairs), 8):
            src, tgt = zip(*pairs[i:i + 8])
            enc = tok(list(src), return_tensors="pt", padding=True, truncation=True).to(device)
            lab = tok(list(tgt), return_tensors="pt", padding=True, truncation=True).input_ids.to(device)
            lab = lab.masked_fill(lab == tok.pad_token_id, -100)
            loss = model(**enc, labels=lab).loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        print(f"epoch {epoch}: {loss.item():.4f}")
    model.save_pretrained("bart-sum")
