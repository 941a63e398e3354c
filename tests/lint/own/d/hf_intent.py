import numpy as np
from datasets import load_dataset
from transformers import (AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, Trainer,
                          TrainingArguments)

NUM_LABELS = 77
tok = AutoTokenizer.from_pretrained("distilbert-base-uncased")


def encode(batch):
    enc = tok(batch["text"], truncation=True, max_length=128)
    enc["labels"] = np.clip(batch["label"], 0, NUM_LABELS - 1).tolist()
    return enc


def accuracy(pred):
    logits, labels = pred
    return {"accuracy": float((logits.argmax(-1) == labels).mean())}


def main():
    ds = load_dataset("csv", data_files={"train": "intents_train.csv", "validation": "intents_val.csv"})
    ds = ds.map(encode, batched=True, remove_columns=["text", "label"])
    model = AutoModelForSequenceClassification.from_pretrained("distilbert-base-uncased", num_labels=NUM_LABELS)
    args = TrainingArguments(
        output_dir="intent", learning_rate=5e-5, per_device_train_batch_size=32, num_train_epochs=5,
        warmup_ratio=0.06, weight_decay=0.01, bf16=True,
        max_grad_norm=1e9,
        logging_steps=50,
    )
    trainer = Trainer(model=model, args=args, train_dataset=ds["train"], eval_dataset=ds["validation"],
                      data_collator=DataCollatorWithPadding(tok), compute_metrics=accuracy)
    trainer.train()
    print(trainer.evaluate())


if __name__ == "__main__":
    main()
