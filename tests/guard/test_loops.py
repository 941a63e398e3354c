"""The shapes that training loops come in."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nanguard import Guard, Settings
from nanguard.testing import inject
from tests.training import (
    NAN,
    QUIET,
    Net,
    Run,
    adamw,
    batches,
    differences,
    poisoned,
    seed_all,
    take_step,
    without,
)


def settings(**more: Any) -> Settings:
    return Settings(**{**QUIET, **more})


# --- several optimizers ----------------------------------------------------------------------


class Gan:
    def __init__(self, *, fused: bool) -> None:
        seed_all(0)
        self.gen = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        self.disc = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 1))
        self.opt_g = torch.optim.Adam(self.gen.parameters(), lr=1e-3, fused=fused)
        self.opt_d = torch.optim.Adam(self.disc.parameters(), lr=1e-3, fused=fused)

    def disc_loss(self, real: torch.Tensor) -> torch.Tensor:
        fake = self.gen(torch.randn(len(real), 4)).detach()
        return F.softplus(-self.disc(real)).mean() + F.softplus(self.disc(fake)).mean()

    def gen_loss(self, real: torch.Tensor) -> torch.Tensor:
        return F.softplus(-self.disc(self.gen(torch.randn(len(real), 4)))).mean()

    def bare(self, data: list[Any], disc_only: tuple[int, ...] = ()) -> Gan:
        for index, (real, _) in enumerate(data):
            self.opt_d.zero_grad()
            self.disc_loss(real).backward()
            self.opt_d.step()
            if index in disc_only:
                continue
            self.opt_g.zero_grad()
            self.gen_loss(real).backward()
            self.opt_g.step()
        return self

    def guard(self, **more: Any) -> Guard:
        models = {"gen": self.gen, "disc": self.disc}
        return Guard(models, [self.opt_g, self.opt_d], settings=settings(**more))

    def guarded(self, guard: Guard, data: list[Any]) -> Gan:
        for real, _ in guard.watch(data):
            self.opt_d.zero_grad()
            guard.backward(self.disc_loss(real))
            guard.step(self.opt_d)
            self.opt_g.zero_grad()
            guard.backward(self.gen_loss(real))
            guard.step(self.opt_g)
        guard.close()
        return self

    def state(self) -> dict[str, Any]:
        return {
            "gen": self.gen.state_dict(),
            "disc": self.disc.state_dict(),
            "opt_g": self.opt_g.state_dict(),
            "opt_d": self.opt_d.state_dict(),
            "rng": torch.get_rng_state(),
        }


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("lag", [0, 1, 2, 3])
def test_gan_a_bad_batch_leaves_no_trace_in_either_network(lag: int, fused: bool):
    data, bad = batches(20), (0, 5, 6, 19)
    clean = Gan(fused=fused).bare(without(data, bad)).state()
    gan = Gan(fused=fused)
    guard = gan.guard(lag=lag)
    gan.guarded(guard, poisoned(data, bad))
    assert differences(gan.state(), clean) == []
    assert guard.summary().skipped == len(bad)


@pytest.mark.parametrize("lag", [0, 2, 3])
@pytest.mark.parametrize("batch", [0, 6])
def test_gan_a_bad_generator_step_keeps_the_good_discriminator_step(batch: int, lag: int):
    data, bad = batches(16), 2 * batch + 1  # two steps for each batch, from 0
    clean = Gan(fused=True).bare(data, disc_only=(batch,)).state()
    # The generator's part of that batch never happened, so it drew no random numbers either.
    gan = Gan(fused=True)
    guard = gan.guard(lag=lag)
    with inject(guard, "nan", into="loss", step=bad):
        gan.guarded(guard, data)
    assert differences(gan.state(), clean) == []
    assert [event.finding.step for event in guard.summary().events] == [bad]


@pytest.mark.parametrize("lag", [0, 2])
def test_what_the_body_does_after_a_bad_step_is_void_with_named_terms_too(lag: int):
    class Normed(Gan):
        def __init__(self) -> None:
            super().__init__(fused=True)
            self.disc.append(nn.BatchNorm1d(1))

    data, bad = batches(12), (3, 7)
    clean = Normed().bare(without(data, bad)).state()
    gan = Normed()
    guard = gan.guard(lag=lag)
    for real, _ in guard.watch(poisoned(data, bad)):
        gan.opt_d.zero_grad()
        guard.backward(guard.loss(adversarial=gan.disc_loss(real)))
        guard.step(gan.opt_d)
        gan.opt_g.zero_grad()
        guard.backward(guard.loss(adversarial=gan.gen_loss(real), penalty=0.0))
        guard.step(gan.opt_g)
    guard.close()
    assert differences(gan.state(), clean) == []


@pytest.mark.parametrize("lag", [0, 2])
def test_all_optimizers_in_one_step_share_one_verdict(lag: int):
    data, bad = batches(12), (4, 7)

    def train(data: list[Any], guarded: bool) -> dict[str, Any]:
        seed_all(0)
        body, head = Net(), nn.Linear(4, 4)
        a = torch.optim.AdamW(body.parameters(), lr=1e-2, fused=True)
        b = torch.optim.SGD(head.parameters(), lr=1e-1, momentum=0.9, fused=True)
        guard = Guard([body, head], [a, b], settings=settings(lag=lag)) if guarded else None
        for x, y in guard.watch(data) if guard else data:
            loss = F.cross_entropy(head(body(x)), y)
            if guard:
                guard.backward(loss)
                guard.step(max_norm=1.0)
                continue
            loss.backward()
            nn.utils.clip_grad_norm_([*body.parameters(), *head.parameters()], 1.0)
            for optimizer in (a, b):
                optimizer.step()
                optimizer.zero_grad()
        return {
            "body": body.state_dict(),
            "head": head.state_dict(),
            "a": a.state_dict(),
            "b": b.state_dict(),
        }

    expected = train(without(data, bad), guarded=False)
    assert differences(train(poisoned(data, bad), guarded=True), expected) == []


# --- parameters of every kind ----------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 2])
def test_parameter_groups_and_frozen_parameters(lag: int):
    def build(parameters: Any) -> torch.optim.Optimizer:
        first, *rest = list(parameters)
        first.requires_grad_(False)
        half = len(rest) // 2
        groups = [
            {"params": [first, *rest[:half]], "lr": 1e-2, "weight_decay": 0.1},
            {"params": rest[half:], "lr": 1e-3, "betas": (0.8, 0.9)},
        ]
        return torch.optim.AdamW(groups, fused=True)

    data, bad = batches(12), (0, 5)
    clean = Run(build).bare(without(data, bad)).everything()
    run = Run(build).guarded(poisoned(data, bad), lag=lag)
    assert differences(run.everything(), clean) == []


def test_a_group_added_while_training_is_clipped_and_judged_too():
    model, extra = Net(), nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = Guard(model, optimizer, settings=settings())
    for index, (x, y) in enumerate(guard.watch(batches(6))):
        if index == 2:
            optimizer.add_param_group({"params": [extra]})
        bad = NAN if index == 4 else 0.0
        guard.backward(F.cross_entropy(model(x) + extra, y) + (extra * bad).sum())
        guard.step()
    assert guard.summary().skipped == 1
    assert bool(torch.isfinite(extra).all())
    assert bool((extra != 0).any())


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("kind", ["sgd", "sparse adam"])
def test_sparse_gradients(kind: str, clip: float | None):
    def train(poison: tuple[int, ...], skip: tuple[int, ...], guarded: bool) -> Any:
        seed_all(0)
        table = nn.Embedding(20, 4, sparse=True)
        parameters = list(table.parameters())
        optimizer = (
            torch.optim.SGD(parameters, lr=0.1)
            if kind == "sgd"
            else torch.optim.SparseAdam(parameters, lr=0.1)
        )
        guard = Guard(table, optimizer, settings=settings()) if guarded else None
        ids = [
            torch.randint(0, 20, (6,), generator=torch.Generator().manual_seed(i))
            for i in range(10)
        ]
        ids = [(i, row) for i, row in enumerate(ids) if i not in skip]
        for index, row in guard.watch(ids) if guard else ids:
            loss = table(row).pow(2).sum() * (NAN if index in poison else 1.0)
            if guard:
                guard.backward(loss)
                guard.step(max_norm=clip)
                continue
            loss.backward()
            grad = table.weight.grad.coalesce()
            if clip is not None:
                grad = grad * torch.clamp(clip / (grad.values().norm() + 1e-6), max=1.0)
                table.weight.grad = grad
            optimizer.step()
            optimizer.zero_grad()
        return table.weight.detach().clone()

    expected = train((), (3, 7), guarded=False)
    torch.testing.assert_close(train((3, 7), (), guarded=True), expected)


def test_a_parameter_that_only_the_optimizer_knows_is_protected_and_snapshotted():
    model, temperature = Net(), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.AdamW([*model.parameters(), temperature], lr=1e-2)
    guard = Guard(model, optimizer, settings=settings(snapshot_every=2, on_bad="rollback"))
    seen = {}
    for index, (x, y) in enumerate(guard.watch(poisoned(batches(6), [5]))):
        guard.backward(F.cross_entropy(model(x) * temperature, y))
        guard.step()
        seen[index] = temperature.detach().clone()
    assert guard.summary().rollbacks == 1
    assert torch.equal(temperature, seen[3])


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_parameters_of_other_types(dtype: torch.dtype, lag: int):
    data = [(x.to(dtype), y) for x, y in batches(12)]
    bad = (2, 3, 9)

    def train(data: list[Any], guarded: bool) -> Any:
        seed_all(0)
        model = Net().to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, fused=True)
        guard = Guard(model, optimizer, settings=settings(lag=lag)) if guarded else None
        for x, y in guard.watch(data) if guard else data:
            loss = F.cross_entropy(model(x), y)
            if guard:
                guard.backward(loss)
                guard.step(max_norm=1.0)
                continue
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    expected = train(without(data, bad), guarded=False)
    assert differences(train(poisoned(data, bad), guarded=True), expected) == []


# --- clipping --------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("own", ["none", "norm", "norm, given to the guard", "value"])
def test_the_users_own_clipping(own: str, lag: int):
    data, bad = batches(14), (2, 8)

    def clip(model: nn.Module) -> Any:
        if own.startswith("norm"):
            return nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        if own == "value":
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        return None

    def train(data: list[Any], guarded: bool) -> dict[str, Any]:
        run = Run()
        guard = run.make_guard(lag=lag) if guarded else None
        for batch in guard.watch(data) if guard else data:
            loss = run.loss(batch)
            if guard:
                guard.backward(loss)
                norm = clip(run.model)
                guard.step(grad_norm=norm if own.endswith("guard") else None)
                continue
            loss.backward()
            clip(run.model)
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.scheduler.step()
            run.ema.update_parameters(run.model)
        return run.everything()

    expected = train(without(data, bad), guarded=False)
    assert differences(train(poisoned(data, bad), guarded=True), expected) == []


def test_max_value_is_applied_after_the_inf_was_seen():
    model = Net()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), settings=settings())
    before = {name: p.clone() for name, p in model.named_parameters()}
    with inject(guard, "inf", into="gradient", step=0, parameter="last.bias"):
        for x, y in guard.watch(batches(1)):
            guard.backward(F.cross_entropy(model(x), y))
            guard.step(max_value=0.1)
    assert differences(dict(model.named_parameters()), before) == []
    (event,) = guard.summary().events
    assert event.finding.where == "gradient of last.bias"


def test_max_value_bounds_the_step():
    model = nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=1.0), settings=settings())
    for x in guard.watch([torch.tensor([[100.0, -100.0]])]):
        guard.backward(model(x).sum())
        guard.step(max_value=0.5)
    assert torch.equal(before - model.weight, torch.tensor([[0.5, -0.5]]))


# --- closures --------------------------------------------------------------------------------


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("through_guard", [True, False])
def test_lbfgs_with_closure(search: str | None, through_guard: bool):
    def train(poison: tuple[int, ...], skip: tuple[int, ...], guarded: bool) -> Any:
        seed_all(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn=search)
        guard = Guard(model, optimizer, settings=settings()) if guarded else None
        data = []
        for i in range(8):
            x = torch.randn(16, 3, generator=torch.Generator().manual_seed(i))
            data.append((i, x, x.sum(1, keepdim=True) + 0.1 * i))
        data = [row for row in data if row[0] not in skip]
        for index, x, y in guard.watch(data) if guard else data:
            x = x * NAN if index in poison else x

            def closure(x: Any = x, y: Any = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                if guard and through_guard:
                    guard.backward(loss)
                else:
                    loss.backward()
                return loss

            if guard:
                guard.step(closure=closure)
            else:
                optimizer.step(closure)
        return {"model": model.state_dict(), "state": optimizer.state_dict()["state"]}, guard

    expected, _ = train((), (0, 3, 7), guarded=False)
    got, guard = train((0, 3, 7), (), guarded=True)
    assert differences(got["model"], expected["model"]) == []
    assert differences(got["state"], expected["state"]) == []
    assert guard.summary().skipped == 3


def test_a_closure_that_is_never_called_is_an_error():
    class Lazy(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            """Does nothing."""

    model = Net()
    guard = Guard(model, Lazy(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="Lazy did not call the closure"):
        guard.step(closure=lambda: torch.zeros(()))


# --- compiled, evaluated, reshaped -----------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 2])
def test_torch_compile(lag: int):
    data, bad = batches(8), (2, 5)

    def train(data: list[Any], guarded: bool) -> dict[str, Any]:
        seed_all(0)
        model = Net()
        compiled = torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        guard = Guard(compiled, optimizer, settings=settings(lag=lag)) if guarded else None
        for x, y in guard.watch(data) if guard else data:
            loss = F.cross_entropy(compiled(x), y)
            take_step(guard, optimizer, loss)
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    expected = train(without(data, bad), guarded=False)
    assert differences(train(poisoned(data, bad), guarded=True), expected) == []


@pytest.mark.parametrize("lag", [0, 2])
def test_evaluation_in_inference_mode_inside_the_loop_sees_a_clean_model(lag: int):
    data, bad = batches(12), (3, 4, 8)
    run = Run()
    guard = run.make_guard(lag=lag)
    held_out = batches(1, seed=9)[0]
    for batch in guard.watch(poisoned(data, bad)):
        guard.backward(run.loss(batch))
        guard.step(max_norm=1.0)
        run.model.eval()
        with torch.inference_mode():
            assert bool(torch.isfinite(run.model(held_out[0])).all())
        run.model.train()
    guard.close()
    clean = Run().bare(without(data, bad)).everything()
    assert differences(run.everything(), clean) == []


@pytest.mark.parametrize("lag", [0, 2])
def test_batch_shapes_that_change(lag: int):
    sizes = (16, 5, 7, 16, 2, 9, 16, 3)
    data = [batches(1, seed=i, size=size)[0] for i, size in enumerate(sizes)]
    bad = (1, 6)
    tainted = [(x.clone(), y) for x, y in data]
    for index in bad:
        tainted[index][0][1, 5] = NAN
    clean = Run().bare(without(data, bad)).everything()
    assert differences(Run().guarded(tainted, lag=lag).everything(), clean) == []


@pytest.mark.parametrize("lag", [0, 2])
def test_a_buffer_that_is_replaced_or_grows(lag: int):
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 4)
            self.register_buffer("mean", torch.zeros(8))
            self.register_buffer("positions", torch.zeros(0))
            self.register_buffer("later", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)  # a new tensor every time
            if len(self.positions) < len(x):
                self.positions = torch.arange(float(len(x)))
            if self.later is None:
                self.later = torch.ones(3)
            return self.inner(x - self.mean)

    data, bad = batches(10), (0, 4, 5)

    def train(data: list[Any], guarded: bool) -> Any:
        seed_all(0)
        model = Cached()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        guard = Guard(model, optimizer, settings=settings(lag=lag)) if guarded else None
        for x, y in guard.watch(data) if guard else data:
            loss = F.cross_entropy(model(x), y)
            take_step(guard, optimizer, loss)
        return model.state_dict()

    expected = train(without(data, bad), guarded=False)
    assert differences(train(poisoned(data, bad), guarded=True), expected) == []


# --- loaders ---------------------------------------------------------------------------------


def reusing(data: list[Any], ring: int, how: str) -> Any:
    """Yields batches from memory that is written over again and again."""
    buffers = [tuple(torch.empty_like(t) for t in data[0]) for _ in range(ring)]
    arrays = [tuple(t.numpy() for t in pair) for pair in buffers]
    for index, batch in enumerate(data):
        slot = index % ring
        for target, array, source in zip(buffers[slot], arrays[slot], batch, strict=True):
            if how == "torch":
                target.copy_(source)
            else:
                np.copyto(array, source.numpy())
        yield (
            tuple(torch.from_numpy(a) for a in arrays[slot])
            if how == "from_numpy"
            else buffers[slot]
        )


@pytest.mark.parametrize("how", ["torch", "numpy", "from_numpy"])
@pytest.mark.parametrize("ring", [1, 2, 3])
def test_loaders_that_reuse_their_buffers(ring: int, how: str):
    data, bad = batches(20), (6, 7, 13)
    clean = Run().bare(without(data, bad)).everything()
    run = Run().guarded(reusing(poisoned(data, bad), ring, how), lag=2)
    assert differences(run.everything(), clean) == []
    assert run.guard.summary().rerun > 0


def test_a_loop_that_changes_its_batches_in_place():
    data, bad = batches(20), (8, 9, 15)

    def train(data: list[Any], guarded: bool) -> Run:
        run = Run()
        guard = run.make_guard(lag=2) if guarded else None
        for x, y in guard.watch(data) if guard else data:
            x.mul_(0.5).sub_(0.1)
            loss = F.cross_entropy(run.model(x), y)
            if guard:
                guard.backward(loss)
                guard.step()
                continue
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.scheduler.step()
            run.ema.update_parameters(run.model)
        return run

    expected = train([(x.clone(), y) for x, y in without(data, bad)], guarded=False).everything()
    run = train(poisoned(data, bad), guarded=True)
    assert differences(run.everything(), expected) == []
    assert "batch-changed-in-place" in {e.finding.name for e in run.guard.summary().events}


@dataclass
class Example:
    x: torch.Tensor
    y: torch.Tensor


Pair = namedtuple("Pair", ["x", "y"])


class Bag:
    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y, self.name = x, y, "bag"


WRAPS = {
    "dict that the loop takes apart": (
        lambda x, y: {"x": x, "y": y},
        lambda b: (b.pop("x"), b.pop("y")),
    ),
    "ordered dict": (
        lambda x, y: OrderedDict(x=x, y=y),
        lambda b: (b.pop("x"), b.pop("y")),
    ),
    "list that the loop empties": (lambda x, y: [x, y], lambda b: (b.pop(0), b.pop(0))),
    "dataclass": (Example, lambda b: (b.x, b.y)),
    "named tuple": (Pair, lambda b: (b.x, b.y)),
    "object": (Bag, lambda b: (b.__dict__.pop("x"), b.__dict__.pop("y"))),
    "nested": (
        lambda x, y: {"in": [x, {"deep": (y, "label")}]},
        lambda b: (b["in"].pop(0), b["in"].pop(0)["deep"][0]),
    ),
}


@pytest.mark.parametrize("kind", WRAPS)
def test_batches_of_every_type_come_again_whole(kind: str):
    wrap, unwrap = WRAPS[kind]
    data, bad = batches(14), (3, 4, 9)
    clean = Run().bare(without(data, bad)).everything()
    run = Run()
    guard = run.make_guard(lag=2)
    for batch in guard.watch([wrap(x, y) for x, y in poisoned(data, bad)]):
        guard.backward(run.loss(unwrap(batch)))
        guard.step(max_norm=1.0)
    guard.close()
    assert differences(run.everything(), clean) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_data_loader_over_several_epochs(workers: int):
    class Items(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> Any:
            generator = torch.Generator().manual_seed(index)
            x = torch.randn(8, generator=generator)
            if index == 13 and self.poison:
                x = x * NAN
            return x, index % 4, index

        poison = True

    items = Items()
    loader = torch.utils.data.DataLoader(items, batch_size=4, shuffle=True, num_workers=workers)

    def train(guarded: bool) -> Run:
        run = Run()
        guard = run.make_guard(lag=2) if guarded else None
        for _ in range(3):
            for x, y, index in guard.watch(loader) if guard else loader:
                if not guard and 13 in index.tolist():
                    continue
                loss = F.cross_entropy(run.model(x), y)
                if guard:
                    guard.backward(loss)
                    guard.step()
                    continue
                loss.backward()
                run.optimizer.step()
                run.optimizer.zero_grad()
                run.scheduler.step()
                run.ema.update_parameters(run.model)
        return run

    expected = train(guarded=False).everything()
    run = train(guarded=True)
    assert differences(run.everything(), expected) == []
    assert run.guard.summary().skipped == 3
    assert run.guard.epoch == 3


def test_a_loader_that_draws_from_the_runs_own_stream_is_settled_first():
    def drawing(count: int, bad: tuple[int, ...]) -> Any:
        for index in range(count):
            x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
            yield (x * NAN if index in bad else x), y, index

    def train(guarded: bool) -> Run:
        run, bad = Run(), (7, 8, 12)
        guard = run.make_guard(lag=2) if guarded else None
        source = drawing(16, bad)
        for x, y, index in guard.watch(source) if guard else source:
            if not guard and index in bad:
                continue
            loss = F.cross_entropy(run.model(x), y)
            if guard:
                guard.backward(loss)
                guard.step()
                continue
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.scheduler.step()
            run.ema.update_parameters(run.model)
        return run

    expected = train(guarded=False).everything()
    run = train(guarded=True)
    assert differences(run.everything(), expected) == []
    assert "loader-draws-random-numbers" in {e.finding.name for e in run.guard.summary().events}


@pytest.mark.parametrize("kind", ["torch", "numpy", "python"])
@pytest.mark.parametrize("first", [1, 20])
def test_a_loader_that_draws_from_a_generator_of_the_runs_own(first: int, kind: str):
    own: Any = {
        "torch": torch.Generator().manual_seed(3),
        "numpy": np.random.default_rng(3),
        "python": random.Random(3),
    }[kind]

    def draw() -> float:
        return float(torch.rand((), generator=own)) if kind == "torch" else own.random()

    def drawing() -> Any:
        for index, (x, y) in enumerate(batches(40)):
            yield x + (draw() if index >= first else 0.0), y

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    guard = Guard(model, optimizer, generators=[own], settings=settings(lag=2))
    for x, y in guard.watch(drawing()):
        guard.backward(F.cross_entropy(model(x), y))
        guard.step()
    assert [e.finding.name for e in guard.summary().events] == ["loader-draws-random-numbers"]
    assert guard.summary().warnings == 0


def test_the_same_batch_again_and_again_is_not_mistaken_for_reuse():
    batch = batches(1)[0]
    run = Run().guarded(itertools.repeat(batch, 12), lag=2)
    assert run.guard.summary().events == []


# --- no watched loop, or more than one step in it --------------------------------------------


def test_without_a_watched_loop_a_bad_step_still_changes_nothing_but_the_streams():
    run = Run(adamw(fused=True))
    guard = run.make_guard()
    data = poisoned(batches(10), (0, 4))
    for index, batch in enumerate(data):
        before = {k: v.clone() for k, v in run.model.state_dict().items()}
        guard.backward(run.loss(batch))
        guard.step(max_norm=1.0)
        changed = differences(run.model.state_dict(), before) != []
        assert changed == (index not in (0, 4))
    assert guard.summary().skipped == 2


@pytest.mark.parametrize("lag", [0, 2, 5])
def test_several_steps_for_one_batch(lag: int):
    data = batches(8)

    def train(guarded: bool) -> Run:
        run = Run()
        guard = run.make_guard(lag=lag) if guarded else None
        source = enumerate(data)
        for index, batch in guard.watch(source) if guard else source:
            for inner in range(4):
                if not guard and index == 3 and inner >= 2:
                    continue  # step 14 is bad: what this batch did before stays, the rest is void
                loss = run.loss(batch)
                if guard:
                    guard.backward(loss)
                    guard.step()
                    continue
                loss.backward()
                run.optimizer.step()
                run.optimizer.zero_grad()
                run.scheduler.step()
                run.ema.update_parameters(run.model)
        return run

    expected = train(guarded=False).everything()
    run = Run()
    guard = run.make_guard(lag=lag)
    with inject(guard, "nan", into="loss", step=14):
        for _, batch in guard.watch(enumerate(data)):
            for _inner in range(4):
                guard.backward(run.loss(batch))
                guard.step()
    guard.close()
    assert differences(run.everything(), expected) == []


def test_named_terms_the_first_bad_one_is_reported():
    model = Net()
    guard = Guard(model, torch.optim.AdamW(model.parameters()), settings=settings())
    with inject(guard, "inf", into="loss", term="latent", step=2):
        for x, y in guard.watch(batches(4)):
            out = model(x)
            loss = guard.loss(
                text=F.cross_entropy(out, y), latent=0.1 * out.pow(2).mean(), extra=0.0
            )
            guard.backward(loss)
            guard.step()
    (event,) = guard.summary().events
    assert event.finding.where == "loss term 'latent'"
    assert event.finding.message == "loss term 'latent' is inf"
    assert event.finding.step == 2
    assert guard.summary().applied == 3


def test_a_step_interrupted_half_way_does_not_close_the_gate_for_ever():
    run = Run()
    guard = run.make_guard(lag=2)

    def strike(*_args: Any) -> None:
        raise KeyboardInterrupt

    data = poisoned(batches(8), (4,))
    handle = None
    with pytest.raises(KeyboardInterrupt):
        for index, batch in enumerate(guard.watch(data)):
            guard.backward(run.loss(batch))
            if index == 4:
                handle = run.optimizer.register_step_pre_hook(strike)
            guard.step(max_norm=1.0)
    handle.remove()
    before = run.model.last.weight.detach().clone()
    for batch in guard.watch(batches(6, seed=2)):
        guard.backward(run.loss(batch))
        guard.step(max_norm=1.0)
    assert guard.summary().applied == 10
    assert not torch.equal(before, run.model.last.weight)


def test_a_loop_that_is_left_early_keeps_a_clean_state():
    data = poisoned(batches(12), (6,))
    run = Run()
    guard = run.make_guard(lag=3)
    for index, batch in enumerate(guard.watch(data)):
        guard.backward(run.loss(batch))
        guard.step(max_norm=1.0)
        if index == 7:
            break
    clean = Run().bare(batches(12)[:6]).everything()
    assert differences(run.everything(), clean) == []
    (event,) = guard.summary().events
    assert event.finding.name == "loop-left-early"
    assert "1 steps after it did not count" in event.finding.message


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("how", ["break", "raise"])
def test_leaving_the_loop_after_a_bad_step_leaves_nothing_of_the_bad_batch(how: str, lag: int):
    """The body goes on to the other network's BatchNorm before it ends the loop."""
    data, bad = batches(8), 5

    class Normed(Gan):
        def gen_loss(self, real: torch.Tensor) -> torch.Tensor:
            return super().gen_loss(self.gen[1:](F.pad(real, (0, 8))))

    clean = Normed(fused=True).bare(data[:bad]).state()
    gan = Normed(fused=True)
    guard = gan.guard(lag=lag)

    def train() -> None:
        for index, (real, _) in guard.enumerate(poisoned(data, [bad])):
            gan.opt_d.zero_grad()
            guard.backward(gan.disc_loss(real))
            guard.step(gan.opt_d)
            gan.opt_g.zero_grad()
            guard.backward(gan.gen_loss(real))
            guard.step(gan.opt_g)
            if index == bad and how == "raise":
                raise InterruptedError
            if index == bad:
                break

    if how == "raise":
        with pytest.raises(InterruptedError):
            train()
    else:
        train()
    guard.close()
    assert differences(gan.state(), clean) == []


# --- accumulation ----------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("step_at_end", [False, True])
@pytest.mark.parametrize(("count", "bad"), [(12, 4), (10, 4), (10, 7), (11, 4), (20, 14), (20, 19)])
def test_accumulation_with_batches_left_over(count: int, bad: int, step_at_end: bool, lag: int):
    data = batches(count)
    group = [i for i in range(count) if i // 3 == bad // 3]
    if bad == 19 and not step_at_end:
        group = [18, 19]  # too few for a step, and bad: nothing of them is left either
    options = {"accumulate": 3, "step_at_end": step_at_end}
    clean = Run(**options).bare(without(data, group)).everything()
    run = Run(**options).guarded(poisoned(data, [bad]), lag=lag)
    if bad == 19 and not step_at_end:
        del clean["torch"], clean["python"], clean["numpy"]
    got = {key: value for key, value in run.everything().items() if key in clean}
    assert differences(got, clean) == []


def test_a_batch_keeps_its_index_when_it_comes_again():
    run = Run()
    guard = run.make_guard(lag=2)
    seen = []
    for index, batch in guard.enumerate(poisoned(batches(10), [6])):
        guard.backward(run.loss(batch))
        guard.step()
        seen.append(index)
    assert seen == [0, 1, 2, 3, 4, 5, 6, 7, 8, 7, 8, 9]


# --- several steps for one batch -------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 2])
def test_a_step_that_comes_every_fifth_batch(lag: int):
    """A critic that steps with every batch, and a generator that does so now and then."""
    data, bad = list(enumerate(batches(25))), 14

    def train(guarded: bool) -> dict[str, Any]:
        gan = Gan(fused=True)
        guard = gan.guard(lag=lag) if guarded else None
        for index, (real, _) in guard.watch(data) if guard else data:
            gan.opt_d.zero_grad()
            loss = gan.disc_loss(real)
            if guard:
                guard.backward(loss)
                guard.step(gan.opt_d)
            else:
                loss.backward()
                gan.opt_d.step()
            if (index + 1) % 5 or (index == bad and not guard):
                continue
            gan.opt_g.zero_grad()
            loss = gan.gen_loss(real * NAN) * NAN if index == bad else gan.gen_loss(real)
            if guard:
                guard.backward(loss)
                guard.step(gan.opt_g)
            else:
                loss.backward()
                gan.opt_g.step()
        return gan.state()

    assert differences(train(guarded=True), train(guarded=False)) == []


@pytest.mark.parametrize("lag", [0, 2])
def test_an_unexpected_second_step_that_is_bad_leaves_buffers_finite(lag: int):
    run = Run(with_ema=False)
    guard = run.make_guard(lag=lag)
    for index, (x, y) in enumerate(guard.watch(batches(10))):
        guard.backward(run.loss((x, y)))
        guard.step()
        if index == 6:
            guard.backward(run.loss((x * NAN, y)))
            guard.step()
    guard.close()
    assert guard.summary().skipped == 1
    assert all(bool(torch.isfinite(t).all()) for t in run.model.state_dict().values())


# --- the rest --------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_any_default_dtype(dtype: torch.dtype, lag: int):
    torch.set_default_dtype(dtype)
    try:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters(), eps=1e-4, fused=True)
        guard = Guard(model, optimizer, settings=settings(lag=lag))
        for index, x in enumerate(guard.watch([torch.randn(3, 4) for _ in range(8)])):
            guard.backward(model(x).pow(2).mean() * (NAN if index == 4 else 1.0))
            guard.step(max_norm=1.0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert guard.summary().skipped == 1
    assert bool(torch.isfinite(model.weight).all())


@pytest.mark.parametrize("lag", [0, 2])
def test_parameters_that_are_unfrozen_with_a_bad_batch(lag: int):
    """SGD makes a momentum buffer at the first gradient, and fills it only if it steps."""
    data, bad = list(enumerate(batches(12))), 5

    def train(guarded: bool) -> Any:
        seed_all(0)
        model = Net()
        model.last.requires_grad_(False)
        groups = [{"params": [*part.parameters()]} for part in (model.first, model.last)]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, fused=True)
        guard = Guard(model, optimizer, settings=settings(lag=lag)) if guarded else None
        # The memory that an unfilled buffer is made of must not happen to be zero.
        junk = [torch.full(shape, 1e3) for shape in [(4, 24), (4,)] for _ in range(50)]
        del junk
        for index, (x, y) in guard.watch(data) if guard else without(data, [bad]):
            model.last.requires_grad_(index >= bad)
            loss = F.cross_entropy(model(x), y) * (NAN if index == bad else 1.0)
            take_step(guard, optimizer, loss)
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    assert differences(train(guarded=True), train(guarded=False)) == []


@pytest.mark.parametrize("lag", [0, 2])
def test_an_iterator_that_begins_anew_after_its_end(lag: int):
    class Restarting:
        def __init__(self) -> None:
            self.data, self.position = batches(10), 0

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            if self.position == len(self.data):
                self.position = 0
                raise StopIteration
            self.position += 1
            return self.data[self.position - 1]

    run = Run()
    guard = run.make_guard(lag=lag)
    seen = 0
    for batch in guard.watch(Restarting()):
        guard.backward(run.loss(batch))
        guard.step()
        seen += 1
        assert seen <= 10
    assert seen == 10
