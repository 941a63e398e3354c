import torch
from ignite.contrib.handlers import ProgressBar
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import EarlyStopping, TerminateOnNan
from ignite.metrics import Accuracy, Loss
from torch import nn


class MultiLabel(nn.Module):
    def __init__(self, backbone: nn.Module, dim: int, n: int):
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(dim, n)

    def forward(self, x):
        return self.head(self.backbone(x))

    @torch.inference_mode()
    def predict(self, x, thr=0.5):
        return torch.sigmoid(self(x)) > thr


def to_binary(output):
    logits, y = output
    return (torch.sigmoid(logits) > 0.5).long(), y.long()


def run(model, train_loader, val_loader, epochs=30, device="cuda"):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(5.0, device=device))
    trainer = create_supervised_trainer(model, optimizer, criterion, device=device)
    val = create_supervised_evaluator(
        model, device=device,
        metrics={"acc": Accuracy(output_transform=to_binary, is_multilabel=True), "loss": Loss(criterion)},
    )
    trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    ProgressBar().attach(trainer, output_transform=lambda x: {"loss": x})

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine):
        m = val.run(val_loader).metrics
        print(f"epoch {engine.state.epoch}: acc {m['acc']:.4f} loss {m['loss']:.4f}")

    val.add_event_handler(Events.COMPLETED, EarlyStopping(5, lambda e: -e.state.metrics["loss"], trainer))
    trainer.run(train_loader, max_epochs=epochs)
