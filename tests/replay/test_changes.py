"""What a replay changes is put back, where the process goes on afterwards."""

from __future__ import annotations

import importlib
import logging
import sys
import types
import warnings

import pytest
import torch
import torch.distributed as dist

from nanguard.replay.changes import (
    COLLECTIVES,
    alone,
    quiet,
    replaced_samples,
    swapped_code,
    wider,
    without,
    without_autocast,
)

TEXT = """
def value(x):
    return x + 1


def outer(change):
    with change():
        return value(1)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module whose code nobody has rewritten."""
    path = tmp_path / "swapped_module.py"
    path.write_text(TEXT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "swapped_module", raising=False)
    return importlib.import_module("swapped_module")


def test_code_is_swapped_and_put_back(module):
    with swapped_code({module.__file__: TEXT.replace("x + 1", "x + 2")}):
        assert module.value(1) == 3
    assert module.value(1) == 2


def test_code_that_is_running_is_refused_and_stays(module):
    changed = TEXT.replace("value(1)", "value(5)").replace("x + 1", "x + 2")
    with pytest.raises(RuntimeError, match="already running"):
        module.outer(lambda: swapped_code({module.__file__: changed}))
    assert module.value(1) == 2


def test_samples_are_replaced_in_a_copy():
    batch = {"x": torch.arange(6.0).reshape(3, 2), "y": [torch.arange(3)]}
    changed = without(batch, [1])
    assert changed["x"].tolist() == [[0, 1], [0, 1], [4, 5]]
    assert changed["y"][0].tolist() == [0, 0, 2]
    assert batch["x"].tolist() == [[0, 1], [2, 3], [4, 5]]


def test_autocast_comes_back():
    x = torch.ones(2, 2)
    with without_autocast(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16


class Model(torch.nn.Module):
    """Two layers that name their types."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(2, 4).half(), torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.last(self.first(x.to(torch.float16)).float())


def test_everything_is_wider_for_a_while():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = types.SimpleNamespace(
        named_parameters=lambda: dict(model.named_parameters()),
        buffers=dict,
        optimizers=lambda: [optimizer],
    )
    before = [(p, p.data_ptr(), p.dtype) for p in model.parameters()]
    seen = []
    model.first.register_forward_hook(lambda _m, _args, out: seen.append(out.dtype))
    with wider(torch.float64, watch):
        model(torch.ones(3, 2)).sum().backward()
    assert seen == [torch.float64]
    assert [(p, p.data_ptr(), p.dtype) for p in model.parameters()] == before
    assert (torch.ones(1).half().dtype, torch.get_default_dtype()) == (torch.float16, torch.float32)


def test_files_can_be_loaded_in_a_wider_type(tmp_path):
    torch.save({"x": torch.ones(2), "y": torch.ones(2).half()}, tmp_path / "x.pt")
    watch = types.SimpleNamespace(named_parameters=dict, buffers=dict, optimizers=list)
    with wider(torch.float32, watch):
        loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    assert [x.dtype for x in loaded.values()] == [torch.float32, torch.float16]


def test_samples_are_put_back_and_autograd_does_not_notice():
    model, x, y = torch.nn.Linear(2, 1), torch.arange(6.0).reshape(3, 2), torch.arange(3.0)
    loss = (model(x).squeeze(1) * y).sum()
    seen = []
    model.register_forward_hook(lambda _m, args, _out: seen.append(args[0].tolist()))
    with replaced_samples([1], targets_only=False):
        model(x)
    assert seen == [[[0, 1], [0, 1], [4, 5]]]
    assert x.tolist() == [[0, 1], [2, 3], [4, 5]]
    loss.backward()


def test_nothing_is_printed_logged_or_warned_of(capsys, caplog):
    with warnings.catch_warnings(), quiet():
        warnings.simplefilter("always")
        print("printed")
        print("printed", file=sys.stderr)
        logging.getLogger("somebody").error("logged")
        warnings.warn("warned", stacklevel=1)
    print("after")
    assert capsys.readouterr() == ("after\n", "")
    assert caplog.records == []


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'ranks'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_rank_alone_says_nothing_to_the_others(monkeypatch):
    def said(*_args, **_kwargs):
        raise AssertionError("the other ranks have heard this")

    for name in COLLECTIVES:
        if name in vars(dist):
            monkeypatch.setattr(dist, name, said)
    mine, of_two = torch.arange(3.0), torch.zeros(6)
    with alone():
        dist.all_reduce(mine)
        dist.all_gather_into_tensor(of_two, mine)
        with pytest.raises(RuntimeError, match="one rank alone"):
            dist.reduce_scatter_tensor(mine, of_two)
    assert of_two.tolist() == [0.0, 1.0, 2.0, 0.0, 1.0, 2.0]
    assert dist.all_reduce is said


def test_every_collective_of_torch_is_known():
    functions = {n for n in dist.distributed_c10d.__all__ if callable(vars(dist).get(n))}
    words = ("gather", "reduce", "scatter", "all_to_all", "broadcast", "barrier", "send", "recv")
    together = {n for n in functions if any(word in n for word in words) and n.islower()}
    assert together
    assert together <= set(COLLECTIVES)
