import numpy as np
import torch


def build(model, total, lr=0.05):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)

    def factor(step):
        return float(np.power(np.float64(1.0 - step / total), 0.9))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
