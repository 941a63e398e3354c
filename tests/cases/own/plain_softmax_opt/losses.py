import torch


def rating_loss(scores, rating):
    probs = torch.softmax(scores, dim=-1)
    picked = probs.gather(1, rating[:, None]).squeeze(1)
    return -torch.log(picked).mean()
