import torch
import torch.nn as nn
import torch.nn.functional as F


class ResBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        return x + self.fc2(F.relu(self.fc1(x)))


class MovePolicy(nn.Module):
    def __init__(self, planes=18, moves=24, d=32):
        super().__init__()
        self.stem = nn.Linear(planes, d)
        self.tower = nn.Sequential(ResBlock(d), ResBlock(d))
        self.head = nn.Linear(d, moves)

    def forward(self, board, legal):
        logits = self.head(self.tower(F.relu(self.stem(board))))
        return logits.masked_fill(~legal, float("-inf"))


def self_play(g, step, n=8):
    board = torch.randn(n, 18, generator=g)
    legal = torch.rand(n, 24, generator=g) < 0.5
    move = (board @ torch.ones(18, 24).tril()).argmax(1)
    legal[torch.arange(n), move] = True
    if step == 4:
        move[5] = torch.nonzero(~legal[5])[0, 0]
    return board, legal, move


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(14)
    model = MovePolicy().half()
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(8):
        board, legal, move = self_play(g, step)
        logits = model(board.half(), legal)
        loss = F.cross_entropy(logits.float(), move)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
