"""Real small trainings that look suspicious and are healthy: the defaults must stay silent."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nanguard import Guard
from tests.training import seed_all

pytestmark = pytest.mark.slow


def assert_silent(guard: Guard) -> None:
    summary = guard.summary()
    assert [str(event) for event in summary.events] == []
    assert summary.applied == summary.steps


@pytest.mark.parametrize("seed", range(3))
def test_a_gan(seed: int):
    seed_all(seed)
    gen = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    disc = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    opt_g = torch.optim.Adam(gen.parameters(), lr=2e-3, betas=(0.5, 0.99))
    opt_d = torch.optim.Adam(disc.parameters(), lr=2e-3, betas=(0.5, 0.99))
    guard = Guard([gen, disc], [opt_g, opt_d])
    for _ in guard.watch(range(700)):
        angle = torch.randint(0, 8, (64,)) * (2 * math.pi / 8)
        real = torch.stack([angle.cos(), angle.sin()], 1) * 2 + 0.05 * torch.randn(64, 2)
        fake = gen(torch.randn(64, 8))
        opt_d.zero_grad()
        guard.backward(F.softplus(-disc(real)).mean() + F.softplus(disc(fake.detach())).mean())
        guard.step(opt_d)
        opt_g.zero_grad()
        guard.backward(F.softplus(-disc(gen(torch.randn(64, 8)))).mean())
        guard.step(opt_g)
    assert_silent(guard)


class Pole:
    """A pole on a cart: four numbers, two actions, one reward per step it stays up."""

    def __init__(self) -> None:
        self.state = 0.05 * torch.randn(4)

    def step(self, action: int) -> tuple[torch.Tensor, bool]:
        x, v, angle, turn = self.state.tolist()
        force = 10.0 if action else -10.0
        inner = (force + 0.05 * turn * turn * math.sin(angle)) / 1.1
        torque = 9.8 * math.sin(angle) - math.cos(angle) * inner
        turning = torque / (0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2 / 1.1))
        pushing = inner - 0.05 * turning * math.cos(angle) / 1.1
        new = [x + 0.02 * v, v + 0.02 * pushing, angle + 0.02 * turn, turn + 0.02 * turning]
        self.state = torch.tensor(new)
        return self.state, abs(new[0]) > 2.4 or abs(new[2]) > 0.21


@pytest.mark.parametrize("seed", range(3))
def test_reinforcement_learning_with_growing_returns(seed: int):
    seed_all(seed)
    policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    value = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    both = nn.ModuleList([policy, value])
    guard = Guard(both, torch.optim.Adam(both.parameters(), lr=5e-3))
    lengths = []
    for _ in guard.watch(range(300)):
        pole, states, actions, done = Pole(), [], [], False
        while not done and len(states) < 200:
            states.append(pole.state)
            with torch.no_grad():
                actions.append(torch.distributions.Categorical(logits=policy(pole.state)).sample())
            _, done = pole.step(int(actions[-1]))
        lengths.append(len(states))
        returns, total = [], 0.0
        for _step in states:
            total = 1.0 + 0.98 * total
            returns.insert(0, total)
        seen, got = torch.stack(states), torch.tensor(returns)
        baseline = value(seen).squeeze(1)
        chosen = torch.distributions.Categorical(logits=policy(seen)).log_prob(torch.stack(actions))
        gain = -(chosen * (got - baseline.detach())).mean()
        guard.backward(gain + 0.5 * F.mse_loss(baseline, got))
        guard.step(max_norm=1.0)
    assert sum(lengths[-50:]) > 2 * sum(lengths[:50])
    assert_silent(guard)


def language_model(seed: int) -> tuple[nn.Module, Any]:
    seed_all(seed)
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True, norm_first=True)
    table = nn.Embedding(40, 32)
    model = nn.Sequential(
        table, nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 40)
    )

    def data(count: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(count):
            start = torch.randint(0, 40, (16, 1), generator=generator)
            stride = torch.randint(1, 4, (16, 1), generator=generator)
            yield (start + stride * torch.arange(13)) % 40

    return model, data


@pytest.mark.parametrize("peak", [1e-3, 1e-2])
def test_a_language_model_with_warm_up(peak: float):
    model, data = language_model(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, total_steps=500)
    guard = Guard(model, optimizer, scheduler=schedule)
    for tokens in guard.watch(data(499)):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        guard.backward(loss)
        guard.step(max_norm=1.0)
    assert_silent(guard)


def test_a_run_resumed_with_a_fresh_optimizer():
    """The usual shortcut: the weights are loaded, the optimizer's moments are not."""
    model, data = language_model(2)
    for _ in range(2):
        guard = Guard(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
        for tokens in guard.watch(data(200)):
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            guard.backward(loss)
            guard.step(max_norm=1.0)
        assert_silent(guard)
