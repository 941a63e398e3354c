import numpy as np
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, Trainer, TrainerCallback, TrainingArguments


class WeightedTrainer(Trainer):
    def __init__(self, *args, class_counts=None, **kwargs):
        super().__init__(*args, **kwargs)
        counts = torch.as_tensor(class_counts, dtype=torch.float)
        self.weight = (counts.sum() / (len(counts) * counts.clamp(min=1))).clamp(max=10.0)

    def compute_loss(self, model, inputs, return_outputs=False, **kw):
        labels = inputs.pop("labels")
        out = model(**inputs)
        loss = nn.functional.cross_entropy(out.logits.float(), labels, weight=self.weight.to(out.logits.device))
        return (loss, out) if return_outputs else loss


class StopOnBadLoss(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kw):
        loss = (logs or {}).get("loss")
        if loss is not None and not np.isfinite(loss):
            print(f"step {state.global_step}: loss {loss}, stopping")
            control.should_training_stop = True


def metrics(pred):
    y, p = pred.label_ids, np.argmax(pred.predictions, -1)
    tp = np.array([((p == c) & (y == c)).sum() for c in np.unique(y)])
    n = np.array([(y == c).sum() for c in np.unique(y)])
    return {"acc": float((p == y).mean()), "macro_recall": float((tp / n).mean())}


def main(name, train, dev, counts):
    model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=len(counts))
    args = TrainingArguments("out", learning_rate=2e-5, num_train_epochs=4, bf16=True, max_grad_norm=1.0, logging_nan_inf_filter=False, eval_strategy="epoch")
    t = WeightedTrainer(model=model, args=args, train_dataset=train, eval_dataset=dev, compute_metrics=metrics, class_counts=counts, callbacks=[StopOnBadLoss()])
    t.train()
