import io

import numpy as np
import torch
import torch.nn as nn

HEADER = "rpm,torque,oil_temp,flow,power"


def export_csv(rows=64, seed=2):
    rng = np.random.default_rng(seed)
    rpm, torque = rng.uniform(0.5, 1.5, rows), rng.uniform(0.2, 1.0, rows)
    oil, flow = rng.normal(0.0, 1.0, rows), rng.uniform(0.0, 2.0, rows)
    table = np.stack([rpm, torque, oil, flow, rpm * torque + 0.05 * oil], axis=1)
    lines = [",".join(f"{v:.5f}" for v in row) for row in table]
    cells = lines[45].split(",")
    cells[3] = "1.7976931348623157e+308"
    lines[45] = ",".join(cells)
    return "\n".join([HEADER, *lines])


def to_batch(rows):
    block = rows.astype(np.float32)
    x = torch.from_numpy(block[:, :4])
    y = torch.from_numpy(block[:, 4:])
    return x, y


class TurbineModel(nn.Module):
    def __init__(self, d=4, h=24):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, h), nn.SiLU(), nn.Linear(h, 1))

    def forward(self, x):
        return self.mlp(self.norm(x))


def main():
    torch.manual_seed(0)
    table = np.genfromtxt(io.StringIO(export_csv()), delimiter=",", skip_header=1)
    model = TurbineModel()
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=3, gamma=0.5)
    for step, start in enumerate(range(0, len(table), 8)):
        x, y = to_batch(table[start:start + 8])
        loss = nn.functional.smooth_l1_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
