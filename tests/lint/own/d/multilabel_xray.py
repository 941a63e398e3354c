import torch
import torch.nn as nn
from torchvision.models import densenet121


class CheXNet(nn.Module):
    def __init__(self, n_classes=14):
        super().__init__()
        self.net = densenet121(weights="DEFAULT")
        self.net.classifier = nn.Linear(self.net.classifier.in_features, n_classes)

    def forward(self, x):
        return self.net(x)


def weighted_bce(prob, y, pos_w, neg_w):
    loss = -(pos_w * y * (prob + 1e-7).log() + neg_w * (1 - y) * (1 - prob + 1e-7).log())
    return loss.mean()


def train(model, loader, optimizer, device, epochs=10):
    criterion = nn.BCELoss(reduction="mean")
    for epoch in range(epochs):
        running = 0.0
        for images, labels in loader:
            images, labels = images.to(device), labels.float().to(device)
            probs = torch.sigmoid(model(images))
            loss = criterion(probs, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.item() * images.size(0)
        print(f"epoch {epoch}: {running / len(loader.dataset):.4f}")


def restore(model, optimizer, path):
    ckpt = torch.load(path, map_location="cuda:0", weights_only=False)
    model.load_state_dict(ckpt["state_dict"])
    optimizer.load_state_dict(ckpt["optimizer"])
    return ckpt["epoch"]
