import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def load_houses(n=160):
    g = torch.Generator().manual_seed(1)
    area = 800 + 2200 * torch.rand(n, generator=g)      # square feet
    year = 1950 + (70 * torch.rand(n, generator=g)).floor()
    lot = 5000 + 9000 * torch.rand(n, generator=g)
    rooms = torch.randint(2, 7, (n,), generator=g).float()
    price = 120.0 * area + 900 * (year - 1950) + 3 * lot + 8000 * rooms
    return TensorDataset(torch.stack([area, year, lot, rooms], 1), price / 1000.0)


class PriceModel(nn.Module):
    def __init__(self, d=4):
        super().__init__()
        self.hidden = nn.Linear(d, 16)
        self.act = nn.LeakyReLU(0.1)
        self.out = nn.Linear(16, 1)

    def forward(self, x):
        return self.out(self.act(self.hidden(x))).squeeze(-1)


def main():
    torch.manual_seed(0)
    model, criterion = PriceModel(), nn.MSELoss()
    opt = torch.optim.SGD(model.parameters(), lr=1e-7, momentum=0.9)
    for step, (x, price) in enumerate(DataLoader(load_houses(), batch_size=16)):
        loss = criterion(model(x), price)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
