"""No hook, patch or attribute is left on model or optimizer, whatever happens."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.modules.module as torch_module
from torch.optim.swa_utils import AveragedModel

from nanguard import Guard, NonFiniteError, Settings
from nanguard.testing import inject
from tests.training import Net, batches, poisoned

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def traces(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Returns everything about them that a guard could leave something in."""
    return {
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "hooks": [
            {name: list(getattr(module, name)) for name in HOOKS} for module in model.modules()
        ],
        "parameters": [list(p._backward_hooks or ()) for p in model.parameters()],
        "optimizer": sorted(vars(optimizer)),
        "optimizer hooks": [
            list(optimizer._optimizer_step_pre_hooks),
            list(optimizer._optimizer_step_post_hooks),
        ],
        "groups": [sorted(group) for group in optimizer.param_groups],
        "class": (type(model), type(optimizer), type(optimizer).step),
    }


def healthy(guard: Guard, model: torch.nn.Module) -> None:
    for x, _ in guard.watch(batches(8)):
        guard.backward(model(x).pow(2).mean())
        guard.step()


def bad(guard: Guard, model: torch.nn.Module) -> None:
    for x, _ in guard.watch(poisoned(batches(8), (2, 3))):
        guard.backward(model(x).pow(2).mean())
        guard.step()


def interrupted(guard: Guard, model: torch.nn.Module) -> None:
    for index, (x, _) in enumerate(guard.watch(batches(8))):
        guard.backward(model(x).pow(2).mean())
        if index == 3:
            raise KeyboardInterrupt
        guard.step()


def interrupted_in_the_optimizer(guard: Guard, model: torch.nn.Module) -> None:
    optimizer = guard._parts.optimizers[0]

    def strike(*_args: Any) -> None:
        raise KeyboardInterrupt

    for index, (x, _) in enumerate(guard.watch(batches(8))):
        guard.backward(model(x).pow(2).mean())
        handle = optimizer.register_step_pre_hook(strike) if index == 3 else None
        try:
            guard.step()
        finally:
            if handle is not None:
                handle.remove()


def failed(guard: Guard, model: torch.nn.Module) -> None:
    for x, _ in guard.watch(batches(8)):
        guard.backward(model(x).pow(2).mean())
        guard.step()
        raise RuntimeError("the user's own mistake")


def stopped(guard: Guard, model: torch.nn.Module) -> None:
    with inject(guard, "nan", into="gradient", parameter="first.weight", step=(1, 2, 3, 4)):
        for x, _ in guard.watch(batches(8)):
            guard.backward(model(x).pow(2).mean())
            guard.step()


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize(
    "story", [healthy, bad, interrupted, interrupted_in_the_optimizer, failed, stopped]
)
def test_nothing_is_left(story: Callable[..., None], lag: int, tmp_path: Path):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer.zero_grad()
    before = traces(model, optimizer)
    threads, hooks = threading.active_count(), global_hooks()
    settings = Settings(max_skips=3, max_lr_cuts=0, max_rollbacks=0, lag=lag)
    guard = Guard(model, optimizer, ema=AveragedModel(model), run_dir=tmp_path, settings=settings)
    try:
        story(guard, model)
    except (KeyboardInterrupt, RuntimeError, NonFiniteError):
        pass
    finally:
        guard.close()
    assert traces(model, optimizer) == before
    assert threading.active_count() == threads
    assert global_hooks() <= hooks


def global_hooks() -> int:
    """Returns how many hooks there are that are called for every module of the process."""
    names = [name for name in vars(torch_module) if name.startswith("_global_")]
    return sum(len(getattr(torch_module, name) or ()) for name in names if name.endswith("hooks"))


def test_nothing_of_the_guard_is_in_the_way_of_copies_and_pickles_while_it_runs():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    guard = Guard(model, optimizer, settings=Settings(lag=2))
    for x, _ in guard.watch(batches(4)):
        guard.backward(model(x).pow(2).mean())
        guard.step()
        copy.deepcopy(model)
        pickle.loads(pickle.dumps(model))
        copy.deepcopy(optimizer)


def test_the_context_manager_closes(tmp_path: Path):
    model = Net()
    with (
        pytest.raises(KeyboardInterrupt),
        Guard(model, torch.optim.AdamW(model.parameters()), run_dir=tmp_path) as guard,
    ):
        for x, _ in guard.watch(batches(3)):
            guard.backward(model(x).pow(2).mean())
            guard.step()
            raise KeyboardInterrupt
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
