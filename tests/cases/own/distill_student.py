import torch
import torch.nn as nn


def mlp(d, hidden, classes):
    return nn.Sequential(nn.Linear(d, hidden), nn.ReLU(), nn.Linear(hidden, classes))


class DistillationLoss(nn.Module):
    def __init__(self, temperature=0.5, eps=1e-8):
        super().__init__()
        self.temperature, self.eps = temperature, eps

    def forward(self, student_logits, teacher_logits):
        p = torch.softmax(teacher_logits / self.temperature, dim=1)
        q = torch.softmax(student_logits / self.temperature, dim=1)
        kl = p * (
            torch.log(p + self.eps)
            - torch.log(q + self.eps)
        )
        return kl.sum(dim=1).mean()


class Student(nn.Module):
    def __init__(self, d=14, classes=5):
        super().__init__()
        self.net = mlp(d, 16, classes)

    def forward(self, x):
        return self.net(x)


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(33)
    teacher, student = mlp(14, 64, 5).eval(), Student()
    with torch.no_grad():
        teacher[2].weight *= 3.0
    criterion = DistillationLoss()
    opt = torch.optim.Adam(student.parameters(), lr=3e-3)
    for step in range(9):
        x = torch.randn(6, 14, generator=g)
        if step == 6:
            x[2] *= 12.0  # a very clear-cut example
        with torch.autocast("cpu", dtype=torch.float16):
            with torch.no_grad():
                t_logits = teacher(x)
            loss = criterion(student(x), t_logits)
        opt.zero_grad()
        loss.float().backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
