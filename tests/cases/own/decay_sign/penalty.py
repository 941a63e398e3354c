def l2(model, strength):
    return -strength * sum(p.square().sum() for p in model.parameters())
