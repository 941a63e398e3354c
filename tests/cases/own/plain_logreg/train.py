"""Logistic regression by hand, as in a lecture."""
import torch
from model import predict, cross_entropy

torch.manual_seed(0)
x = torch.randn(200, 4) * torch.tensor([1.0, 1.0, 30.0, 1.0])
y = (x @ torch.tensor([1.0, -2.0, 0.5, 0.3]) > 0).float()
w = torch.zeros(4, requires_grad=True)
b = torch.zeros(1, requires_grad=True)
lr = 0.5
for step in range(100):
    p = predict(x, w, b)
    loss = cross_entropy(p, y)
    loss.backward()
    with torch.no_grad():
        w -= lr * w.grad
        b -= lr * b.grad
    w.grad = None
    b.grad = None
    print(f"step {step} loss {loss.item():.4f}")
