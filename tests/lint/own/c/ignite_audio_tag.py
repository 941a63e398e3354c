import numpy as np
import torch
from ignite.engine import Engine, Events
from ignite.handlers import ModelCheckpoint
from torch import nn


def make_trainer(model, optimizer, device):
    criterion = nn.BCELoss()

    def step(engine, batch):
        model.train()
        mel, tags = (b.to(device) for b in batch)
        optimizer.zero_grad()
        probs = torch.sigmoid(model(mel))
        loss = criterion(probs, tags.float())
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(step)

    @trainer.on(Events.ITERATION_COMPLETED)
    def stop_on_nan(engine):
        if np.isnan(engine.state.output):
            engine.terminate()

    @trainer.on(Events.ITERATION_COMPLETED(every=100))
    def log(engine):
        print(f"{engine.state.epoch} {engine.state.iteration} {engine.state.output:.4f}")

    return trainer


def main(model, train_loader, epochs=50):
    device = torch.device("cuda")
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trainer = make_trainer(model, optimizer, device)
    saver = ModelCheckpoint("ckpt", "tagger", n_saved=3, require_empty=False)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, saver, {"model": model, "opt": optimizer})
    trainer.run(train_loader, max_epochs=epochs)
