import math

import torch
import torch.nn.functional as F
from transformers import Trainer, TrainingArguments


class DistillTrainer(Trainer):
    def __init__(self, *args, teacher=None, temperature=2.0, alpha=0.5, **kw):
        super().__init__(*args, **kw)
        self.teacher = teacher.eval().requires_grad_(False)
        self.t, self.alpha = temperature, alpha

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        out = model(**inputs)
        with torch.no_grad():
            ref = self.teacher(**inputs).logits
        student = F.softmax(out.logits / self.t, dim=-1)
        kd = F.kl_div(student.log(), F.softmax(ref / self.t, dim=-1), reduction="batchmean") * self.t ** 2
        loss = self.alpha * kd + (1 - self.alpha) * out.loss
        return (loss, out) if return_outputs else loss

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        if math.isnan(loss.item()):
            raise RuntimeError(f"loss is nan at step {self.state.global_step}")
        return loss


def main(model, teacher, train_set, eval_set):
    args = TrainingArguments("out", learning_rate=5e-5, per_device_train_batch_size=32, num_train_epochs=3, bf16=True, warmup_ratio=0.06)
    DistillTrainer(model=model, args=args, train_dataset=train_set, eval_dataset=eval_set, teacher=teacher).train()
