import torch
from accelerate import Accelerator
from timm import create_model
from torch import nn


def train(loader, val_loader, args):
    accelerator = Accelerator()
    model = create_model("vit_small_patch16_224", num_classes=args.classes)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    crit = nn.CrossEntropyLoss(label_smoothing=0.1)
    model, opt, loader, val_loader = accelerator.prepare(model, opt, loader, val_loader)
    for epoch in range(args.epochs):
        model.train()
        for x, y in loader:
            loss = crit(model(x), y)
            if loss != loss:
                accelerator.print("NaN loss, skipping this batch")
                continue
            opt.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1e4)
            opt.step()
        model.eval()
        hits = n = 0
        with torch.no_grad():
            for x, y in val_loader:
                pred, ref = accelerator.gather_for_metrics((model(x).argmax(-1), y))
                hits += (pred == ref).sum().item()
                n += ref.numel()
        accelerator.print(f"epoch {epoch}: acc {hits / max(n, 1):.4f}")
