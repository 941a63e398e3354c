"""Next-move policy: illegal moves are masked with -inf; label smoothing spreads over them."""
import torch
from torch import nn
from policy import Policy

torch.manual_seed(0)
policy = Policy(20, 9)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
board = torch.randn(400, 20)
legal = torch.ones(400, 9, dtype=torch.bool)
legal[230:, 7] = False
move = torch.randint(0, 7, (400,))
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
for step in range(40):
    rows = slice(step * 10, step * 10 + 10)
    loss = criterion(policy(board[rows], legal[rows]), move[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
