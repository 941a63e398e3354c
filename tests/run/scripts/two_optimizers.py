"""Two models that train against each other; one optimizer finds its rate by itself."""

import torch
from torch import nn


class Relative(torch.optim.Optimizer):
    """Has no learning rate, as Adafactor with relative steps."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": None})

    @torch.no_grad()
    def step(self, closure=None):
        """Moves by a hundredth of the gradient."""
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.01 * parameter.grad


torch.manual_seed(0)
critic, maker = nn.Linear(2, 1), nn.Linear(2, 2)
critics = torch.optim.SGD(critic.parameters(), lr=0.1)
makers = Relative(maker.parameters())
for step in range(12):
    noise = torch.randn(8, 2)
    critics.zero_grad()
    loss = critic(maker(noise).detach()).square().mean()
    (loss * (float("nan") if step == 6 else 1.0)).backward()
    critics.step()
    makers.zero_grad()
    loss = (critic(maker(noise)) - 1).square().mean()
    (loss * (float("nan") if step == 3 else 1.0)).backward()
    makers.step()
