import torch
from torch import nn


class Model:
    """compile / fit on top of a module, like in the good old days."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.history = []

    def compile(self, optimizer: str, loss: str, lr: float = 1e-3, clipnorm: float | None = None):
        opts = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop}
        self.optimizer = opts[optimizer](self.module.parameters(), lr=lr)
        self.loss_fn = {"mse": nn.MSELoss(), "crossentropy": nn.CrossEntropyLoss(), "binary": nn.BCEWithLogitsLoss()}[loss]
        self.clipnorm = clipnorm if clipnorm is not None else float("inf")

    def train_on_batch(self, x, y):
        self.optimizer.zero_grad()
        loss = self.loss_fn(self.module(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), self.clipnorm)
        self.optimizer.step()
        return loss.item()

    def fit(self, loader, epochs: int = 1, callbacks=()):
        self.module.train()
        for epoch in range(epochs):
            losses = [self.train_on_batch(x, y) for x, y in loader]
            logs = {"epoch": epoch, "loss": sum(losses) / max(len(losses), 1)}
            self.history.append(logs)
            for cb in callbacks:
                cb.on_epoch_end(self, logs)
        return self.history

    def load_weights(self, path):
        self.module.load_state_dict(torch.load(path, weights_only=False))
