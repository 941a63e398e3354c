from torch import nn


class Policy(nn.Module):
    def __init__(self, width, moves):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, moves))

    def forward(self, board, legal):
        return self.net(board).masked_fill(~legal, float("-inf"))
