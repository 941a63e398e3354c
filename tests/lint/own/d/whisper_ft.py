import argparse
import torch
from transformers import WhisperForConditionalGeneration


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="openai/whisper-small")
    p.add_argument("--lr", type=float, default=1e-5)
    p.add_argument("--epochs", type=int, default=4)
    return p.parse_args()


def main(loader):
    args = get_args()
    model = WhisperForConditionalGeneration.from_pretrained(args.model, torch_dtype=torch.float16).to("cuda")
    for p in model.model.encoder.parameters():
        p.requires_grad = False
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=args.lr, eps=1e-8)
    for epoch in range(args.epochs):
        for batch in loader:
            feats = batch["input_features"].to("cuda", torch.float16)
            labels = batch["labels"].to("cuda").masked_fill(batch["labels"].to("cuda") == 50257, -100)
            loss = model(input_features=feats, labels=labels).loss
            if torch.isnan(loss):
                print("nan loss, batch dropped")
                continue
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trainable, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        model.save_pretrained(f"whisper-ep{epoch}")
