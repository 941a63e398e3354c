def temperature(step, total, start=2.0):
    return start * max(0.0, 1.0 - step / total)
