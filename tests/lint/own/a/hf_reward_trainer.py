import numpy as np
import torch
import torch.nn.functional as F
from datasets import load_dataset
from torch import nn
from transformers import AutoTokenizer, Trainer, TrainingArguments


class BiLSTMScorer(nn.Module):
    def __init__(self, vocab: int, d: int = 256):
        super().__init__()
        self.emb = nn.Embedding(vocab, d, padding_idx=0)
        self.lstm = nn.LSTM(d, d, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * d, 1)

    def forward(self, input_ids, attention_mask, labels=None):
        h, _ = self.lstm(self.emb(input_ids))
        m = attention_mask.unsqueeze(-1).to(h.dtype)
        pooled = (h * m).sum(1) / m.sum(1).clamp(min=1.0)
        score = self.out(pooled).squeeze(-1)
        loss = None
        if labels is not None:
            loss = F.binary_cross_entropy_with_logits(score, labels.float())
        return {"loss": loss, "logits": score}


def metrics(pred):
    prob = 1.0 / (1.0 + np.exp(-np.clip(pred.predictions, -30, 30)))
    y = pred.label_ids
    eps = 1e-7
    nll = -np.mean(y * np.log(prob + eps) + (1 - y) * np.log(1 - prob + eps))
    return {"nll": float(nll), "acc": float(((prob > 0.5) == y).mean())}


def main(out="runs/scorer"):
    tok = AutoTokenizer.from_pretrained("bert-base-uncased")
    ds = load_dataset("imdb").map(lambda r: tok(r["text"], truncation=True, max_length=256), batched=True)
    args = TrainingArguments(
        out, learning_rate=1e-3, per_device_train_batch_size=64, num_train_epochs=3,
        max_grad_norm=1.0, logging_nan_inf_filter=False, eval_strategy="epoch",
    )
    trainer = Trainer(BiLSTMScorer(tok.vocab_size), args, train_dataset=ds["train"], eval_dataset=ds["test"],
                      processing_class=tok, compute_metrics=metrics)
    trainer.train()
    torch.save(trainer.model.state_dict(), f"{out}/scorer.pt")
