import torch
import torch.nn.functional as F
from accelerate import Accelerator

from asr.data import build_loader
from asr.model import Conformer


def main(manifest: str, epochs: int = 30, lr: float = 5e-4):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = Conformer(vocab=256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=1e-2)
    loader = build_loader(manifest, batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(epochs):
        model.train()
        for step, (wav, wav_len, text, text_len) in enumerate(loader):
            with accelerator.accumulate(model):
                log_probs, out_len = model(wav, wav_len)
                loss = F.ctc_loss(log_probs.transpose(0, 1), text, out_len, text_len, zero_infinity=True)
                if torch.isnan(loss) or torch.isinf(loss):
                    print(f"bad loss in epoch {epoch} step {step}, skipping")
                    continue
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_state(f"ckpt/epoch_{epoch}")
