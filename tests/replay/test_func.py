"""Which gradients of torch.func a watcher hears of, and what it can do about them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.func import grad, grad_and_value, vmap

from nanguard.replay.frames import Nobody
from nanguard.replay.patches import FuncGradients, Patches

if TYPE_CHECKING:
    from collections.abc import Iterator


class Listener(Nobody):
    """Keeps what it hears of."""

    def __init__(self) -> None:
        self.heard: list[FuncGradients] = []
        self.zeroes = False

    def func_grad(self, found: Any) -> Any:
        self.heard.append(found)
        return found.zeroed() if self.zeroes else found.result


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    patches = Patches(listener)  # type: ignore[arg-type]
    patches.put_on()
    yield listener
    patches.take_off()


def cube(w: dict[str, torch.Tensor]) -> torch.Tensor:
    return w["a"].pow(3).sum() + w["b"].sum()


W = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([5.0])}


def test_gradient_and_value(listener):
    slopes, value = grad_and_value(cube)(W)
    (found,) = listener.heard
    assert [g.tolist() for g in found.gradients] == [[3.0, 12.0], [1.0]]
    assert found.losses is value
    assert found.of == [W]
    assert slopes["a"] is found.gradients[0]


def test_something_beside_the_value(listener):
    slopes, aside = grad(lambda w: (cube(w), w["b"]), has_aux=True)(W)
    (found,) = listener.heard
    assert aside.tolist() == [5.0]
    assert found.loss.item() == 14.0
    assert len(found.gradients) == len(slopes) == 2


def test_gradients_of_several_arguments(listener):
    grad(lambda a, b: (a * b).sum(), argnums=(0, 1))(W["a"], W["a"] + 1)
    (found,) = listener.heard
    assert [g.tolist() for g in found.gradients] == [[2.0, 3.0], [1.0, 2.0]]
    assert len(found.of) == 2


def test_gradients_inside_of_others_are_a_part_of_them(listener):
    assert grad(grad(torch.sin))(torch.tensor(0.5)).item() == -torch.tensor(0.5).sin().item()
    assert len(listener.heard) == 1


@pytest.mark.parametrize(
    ("make", "alone"),
    [
        (lambda: grad(torch.sin), True),
        (lambda: grad_and_value(torch.sin), False),
        (lambda: lambda x: [grad(torch.sin)(x), x, x], None),
    ],
)
def test_gradients_of_each_sample(listener, make, alone):
    vmap(make())(torch.zeros(3))
    (found,) = listener.heard
    assert found.alone is alone
    assert found.gradients[0].tolist() == [1.0, 1.0, 1.0]
    assert len(found.of) == 1


def test_the_first_bad_sample_counts(listener):
    vmap(grad(torch.log))(torch.tensor([1.0, 2.0, 0.0, -1.0]))
    (found,) = listener.heard
    assert found.loss.item() == float("-inf")


def test_what_is_batched_without_a_gradient_is_no_step(listener):
    vmap(torch.sin)(torch.zeros(3))
    assert not listener.heard


@pytest.mark.parametrize("batched", [False, True])
def test_gradients_of_zero_keep_the_value(listener, batched):
    listener.zeroes = True
    make = vmap(grad_and_value(torch.exp)) if batched else grad_and_value(torch.exp)
    slopes, value = make(torch.zeros(3) if batched else torch.tensor(0.0))
    assert not slopes.any()
    assert (value == 1.0).all()


def test_compiled_code_is_left_alone(listener):
    compiled = torch.compile(lambda w: grad(cube)(w), backend="eager", fullgraph=True)
    assert compiled(W)["a"].tolist() == [3.0, 12.0]
    assert not listener.heard
