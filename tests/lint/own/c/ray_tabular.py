import os
import tempfile

import torch
from ray import train
from ray.train import Checkpoint, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def standardise(x: torch.Tensor) -> torch.Tensor:
    mean = x.mean(0)
    std = x.std(0, unbiased=False)
    return (x - mean) / std.clamp(min=1e-6)


def loop(config):
    data = torch.load(config["data"], weights_only=True)
    ds = TensorDataset(standardise(data["x"]), data["y"])
    loader = prepare_data_loader(DataLoader(ds, batch_size=config["bs"], shuffle=True))
    d = data["x"].size(1)
    model = prepare_model(nn.Sequential(nn.Linear(d, 256), nn.SiLU(), nn.Dropout(0.1), nn.Linear(256, 1)))
    opt = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    for epoch in range(config["epochs"]):
        if train.get_context().get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        total, n = 0.0, 0
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x).squeeze(-1), y)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            total, n = total + loss.item() * len(y), n + len(y)
        with tempfile.TemporaryDirectory() as tmp:
            torch.save(model.state_dict(), os.path.join(tmp, "model.pt"))
            train.report({"rmse": (total / max(n, 1)) ** 0.5}, checkpoint=Checkpoint.from_directory(tmp))


if __name__ == "__main__":
    TorchTrainer(loop, train_loop_config={"data": "table.pt", "bs": 512, "lr": 1e-3, "epochs": 20}, scaling_config=ScalingConfig(num_workers=4, use_gpu=True)).fit()
