import torch
import torch.nn as nn
import torch.nn.functional as F


def mean_std(feat, eps=1e-5):
    b, c = feat.shape[:2]
    var = feat.flatten(2).var(dim=2, unbiased=False) + eps
    return feat.flatten(2).mean(2).view(b, c, 1, 1), var.sqrt().view(b, c, 1, 1)


def adain(content, style):
    cm, cs = mean_std(content)
    sm, ss = mean_std(style)
    return (content - cm) / cs * ss + sm


def gram(x):
    b, c, h, w = x.shape
    f = x.view(b, c, h * w)
    return f @ f.transpose(1, 2) / (c * h * w)


class TVLoss(nn.Module):
    def forward(self, img):
        dx = img[..., :-1, 1:] - img[..., :-1, :-1]
        dy = img[..., 1:, :-1] - img[..., :-1, :-1]
        return torch.sqrt(dx.pow(2) + dy.pow(2) + 1e-6).mean()


def total(vgg, out, content, styles, tv, w=(1.0, 1e5, 1e-4)):
    fo, fc = vgg(out), vgg(content)
    c = F.mse_loss(fo[2], fc[2])
    s = sum(F.mse_loss(gram(a), g) for a, g in zip(fo, styles))
    return w[0] * c + w[1] * s + w[2] * tv(out)


def optimise(vgg, content, style, steps=300):
    img = content.clone().requires_grad_(True)
    opt = torch.optim.LBFGS([img])
    with torch.no_grad():
        grams = [gram(f) for f in vgg(style)]
    tv = TVLoss()
    for _ in range(steps):
        def closure():
            img.data.clamp_(0, 1)
            opt.zero_grad()
            loss = total(vgg, img, content, grams, tv)
            loss.backward()
            return loss
        opt.step(closure)
    return img.data.clamp_(0, 1)
