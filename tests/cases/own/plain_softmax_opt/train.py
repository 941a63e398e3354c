"""Matrix factorisation with a softmax over ratings; factors are leaves given to Adam."""
import torch
from losses import rating_loss

torch.manual_seed(2)
users, items, classes, rank = 60, 40, 5, 8
U = (torch.randn(users, rank) * 0.5).requires_grad_()
V = (torch.randn(items, classes, rank) * 0.5).requires_grad_()
optimizer = torch.optim.Adam([U, V], lr=0.3)
u = torch.randint(0, users, (3000,))
i = torch.randint(0, items, (3000,))
r = torch.randint(0, classes, (3000,))
for step in range(300):
    rows = torch.randint(0, 3000, (64,))
    scores = (V[i[rows]] * U[u[rows]].unsqueeze(1)).sum(-1) * 12.0
    loss = rating_loss(scores, r[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
