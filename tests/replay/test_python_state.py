"""Plain Python state that a replay reaches is put back."""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict, deque

import numpy as np
import pytest
import torch
from torch import nn

from nanguard.replay.patches import Patches
from nanguard.replay.python_state import Reachable, RefusedError, spare
from nanguard.replay.watch import Watch


class Meter:
    total = 0

    def __init__(self):
        self.count, self.seen, self.by_name = 0, [], {"a": {"n": 1}}


class Slotted:
    __slots__ = ("value",)

    def __init__(self):
        self.value = 1


def counting():
    count = 0

    def add():
        nonlocal count
        count += 1
        return count

    return add


def test_counters_lists_dicts_and_closures():
    meter, slotted, add = Meter(), Slotted(), counting()
    kinds = [deque([1, 2], maxlen=3), {1, 2}, Counter("ab"), OrderedDict(a=1, b=2), bytearray(b"x")]
    reachable = Reachable([meter, slotted, add, *kinds], [])
    meter.count += 5
    meter.seen.append(1)
    meter.by_name["a"]["n"] = 7
    meter.new = 1
    slotted.value = 2
    add()
    kinds[0].append(9)
    kinds[1].add(3)
    kinds[2].update("c")
    kinds[3].move_to_end("a")
    kinds[3].pop("b")
    kinds[4].extend(b"yz")
    reachable.put_back()
    assert (meter.count, meter.seen, meter.by_name) == (0, [], {"a": {"n": 1}})
    assert not hasattr(meter, "new")
    assert slotted.value == 1
    assert add() == 1
    assert kinds[0] == deque([1, 2])
    assert kinds[1:3] == [{1, 2}, Counter("ab")]
    assert list(kinds[3].items()) == [("a", 1), ("b", 2)]
    assert kinds[4] == b"x"


def test_arrays_and_tensors_and_what_autograd_knows_of_them():
    array, tensor = np.arange(3.0), torch.arange(3.0)
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * tensor).sum()
    reachable = Reachable([{"array": array, "tensor": tensor}], [])
    array += 1
    tensor.mul_(2)
    reachable.put_back()
    assert array.tolist() == [0, 1, 2]
    assert tensor.tolist() == [0, 1, 2]
    loss.backward()  # nothing was modified, as far as autograd can tell


def test_attributes_of_modules():
    module = nn.Linear(2, 2)
    module.calls, module.cache = 0, {}
    reachable = Reachable([module], [])
    module.calls, module.cache["x"] = 1, 2
    module.register_buffer("made", torch.ones(1))
    reachable.put_back()
    assert (module.calls, module.cache, list(module.buffers())) == (0, {}, [])


def test_what_is_behind_a_partial():
    meter = Meter()
    reachable = Reachable([functools.partial(print, meter)], [])
    meter.count = 4
    reachable.put_back()
    assert meter.count == 0


def test_names_of_a_module():
    names = {"count": 1, "__builtins__": {}}
    reachable = Reachable([], [names])
    names["count"], names["new"] = 2, 3
    reachable.put_back()
    assert names == {"count": 1, "__builtins__": {}}


class Lazy(OrderedDict):
    """Makes its values when it is asked for them, and not all of them can be made."""

    def values(self):
        raise KeyError("made later")

    def __getitem__(self, key):
        raise KeyError(key)


def test_objects_that_run_code_when_they_are_looked_at():
    lazy = Lazy(a=1)
    Reachable([lazy, {"inner": lazy}], []).put_back()
    assert list(lazy) == ["a"]


def test_iterators_of_the_run_are_not_used_up():
    items = iter([1, 2, 3])
    assert next(spare(items, given=False)) == 1
    assert next(items) == 1
    numbers = (n for n in range(3))
    with pytest.raises(RefusedError, match="generator"):
        next(spare(numbers, given=False))
    assert next(numbers) == 0
    assert spare(numbers, given=True) is numbers


def test_patches_leave_an_optimizer_that_inherits_its_step_as_it_was():
    """AdamW has the step of Adam; torch puts one of its own on the class that is made first."""

    class Plain(torch.optim.Adam):
        pass

    class Nobody(Watch):
        before_backward = after_backward = boundary = made = lambda self, *_: None
        judged_step = judged_scaler_step = lambda self, _optimizer, call, *_: call()

    patches = Patches(Nobody())
    patches.put_on()
    optimizer = Plain([torch.zeros(1, requires_grad=True)])
    patches.take_off()
    assert "step" not in vars(Plain)
    optimizer.step()


def test_a_data_set_in_memory_does_not_hide_what_counts():
    samples = [{"n": n} for n in range(50_000)]
    meter = Meter()
    reachable = Reachable([samples, [meter]], [{"more": list(samples)}])
    meter.by_name["a"]["n"] += 1
    samples.pop()
    reachable.put_back()
    assert reachable.complete
    assert (meter.by_name["a"]["n"], len(samples)) == (1, 50_000)
