"""A traced step names the first producer, and only that."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from nanguard.replay.tracer import ops
from nanguard.replay.tracer.origin import bad_rows, origin_of, path_of, producers, suspects
from nanguard.replay.tracer.trace import Trace

INF = float("inf")


@contextlib.contextmanager
def traced(**options):
    trace = Trace(**options)
    trace.start()
    trace.begin_step(0)
    try:
        yield trace
    finally:
        trace.stop()


def origin(trace, tensor, sink="loss"):
    writer = trace.writer(tensor)
    assert writer is not None
    assert writer.bad
    return origin_of(producers([writer])[0], trace, sink=sink)


def line_of(text: str, file: str = __file__) -> int:
    """Returns the line of this file that ends with a mark."""
    lines = Path(file).read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.endswith(f"# {text}"))


def test_producer_is_told_from_propagators():
    x = torch.tensor([1.0, 0.0, 2.0])
    with traced() as trace:
        y = torch.log(x)  # the log
        z = (y * 2).exp() + y
        loss = z.sum()
    found = origin(trace, loss)
    assert (found.phase, found.op, found.module) == ("forward", "aten.log", "loss")
    assert found.site.line == line_of("the log")
    assert found.site.function == "test_producer_is_told_from_propagators"
    assert found.detail.inputs[0].zeros == 1
    assert found.detail.rows == [[1]]


@pytest.mark.parametrize("value", [math.nan, INF, -INF])
def test_bad_data_is_an_input(value):
    data = [[1.0, value], [2.0, 3.0]]
    model = nn.Linear(2, 1)
    with traced() as trace:
        x = torch.tensor(data)  # the data
        loss = model(x).sum()
    found = origin(trace, loss)
    assert (found.phase, found.op, found.module) == ("data", "input", "input")
    assert found.site.line == line_of("the data")


def test_masks_are_meant():
    scores = torch.randn(2, 4)
    mask = torch.tensor([[False, False, True, True], [True] * 4])
    with traced() as trace:
        weights = scores.masked_fill(mask, -INF).softmax(-1)
        loss = weights.sum()
    found = origin(trace, loss)
    assert found.op == "aten._softmax"
    assert found.detail.rows[0] == [1]
    assert [site.function for site in found.literals] == ["test_masks_are_meant"]


def test_mask_with_one_entry_left_is_silent():
    scores = torch.randn(2, 4)
    with traced() as trace:
        mask = torch.full((4,), -INF).index_fill(0, torch.tensor([0]), 0.0)
        loss = (scores + mask).softmax(-1).sum()
    assert not trace.writer(loss).bad
    assert all(record.intended for record in trace.bad)


def test_masked_target_is_where_the_infinity_gets_out():
    logits = torch.randn(3, 5)
    with traced() as trace:
        masked = logits.masked_fill(torch.arange(5) == 2, -INF)
        loss = nn.functional.cross_entropy(masked, torch.tensor([0, 2, 1]))
    found = origin(trace, loss)
    assert found.op == "aten.nll_loss_forward"
    assert found.intended


def test_backward_names_the_forward_line_and_module():
    class Norm(nn.Module):
        def forward(self, x):
            return torch.sqrt((x * x).sum(1))  # the root

    model = nn.Sequential(nn.Linear(3, 3, bias=False), Norm())
    x = torch.zeros(4, 3)
    x[:2] = 1.0
    with traced() as trace:
        loss = model(x).mean()
        loss.backward()
        trace.end_backward()
    assert torch.isfinite(loss)
    trace.know_parameters(dict(model.named_parameters()))
    found = origin(trace, model[0].weight.grad, "gradient")
    assert (found.phase, found.op, found.module) == ("backward", "aten.sqrt", "1")
    assert found.site.line == line_of("the root")
    assert bad_rows(found.detail, 4) == [2, 3]


def test_where_trap_is_in_backward():
    weight = nn.Parameter(torch.tensor([1.0, 0.0]))
    with traced() as trace:
        loss = torch.where(weight > 0, torch.log(weight), 0.0).sum()  # the trap
        loss.backward()
        trace.end_backward()
    assert torch.isfinite(loss)
    found = origin(trace, weight.grad, "gradient")
    assert (found.phase, found.op) == ("backward", "aten.log")
    assert found.site.line == line_of("the trap")


def test_unfilled_parameter_is_init():
    torch.use_deterministic_algorithms(mode=True)
    try:
        with traced() as trace:
            model = nn.Linear(2, 2)
            model.bias = nn.Parameter(torch.empty(2))  # never filled
            loss = model(torch.ones(1, 2)).sum()
    finally:
        torch.use_deterministic_algorithms(mode=False)
    trace.know_parameters(dict(model.named_parameters()))
    found = origin(trace, loss)
    assert (found.phase, found.op, found.parameter) == ("init", "aten.empty", "bias")
    assert found.site.line == line_of("never filled")


def test_unfilled_buffer_that_is_filled_is_silent():
    torch.use_deterministic_algorithms(mode=True)
    try:
        with traced() as trace:
            out = torch.empty(3)
            out.copy_(torch.ones(3))
            loss = out.sum()
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert not trace.writer(loss).bad


def test_optimizer_is_a_phase_of_its_own():
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight], eps=0.0)
    with traced() as trace:
        (weight * torch.tensor([0.0, 1.0, 1.0])).sum().backward()
        trace.end_backward()
        trace.in_optimizer = True
        optimizer.step()
        trace.in_optimizer = False
    found = origin(trace, weight, "parameter")
    assert (found.phase, found.module) == ("optimizer", "optimizer")
    assert found.op.startswith("aten.addcdiv")


def test_partial_write_keeps_the_rest_bad():
    with traced() as trace:
        table = torch.full((2, 3), -INF)
        table[:, 0] = 1.0
        loss = torch.logsumexp(table.T, 0).sum() + torch.logsumexp(table.T[1:], 0).sum()
    found = origin(trace, loss)
    assert found.op == "aten.logsumexp"


def test_custom_function_and_checkpoint():
    class Root(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sqrt()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad / (2 * x.sqrt())  # own backward

    weight = nn.Parameter(torch.tensor([0.0, 1.0]))
    with traced() as trace:
        loss = checkpoint(lambda w: Root.apply(w * 1.0), weight, use_reentrant=False).sum()
        loss.backward()
        trace.end_backward()
    found = origin(trace, weight.grad, "gradient")
    assert found.site.line == line_of("own backward")


def test_bad_value_that_passes_through_finite_ones_is_a_suspect():
    with traced() as trace:
        noise = torch.log(torch.tensor([0.0, 0.5]))
        share = noise.softmax(0)
        loss = (share * share.log()).sum()
    first = producers([trace.writer(loss)])[0]
    earlier = suspects(trace, first)
    assert [record.op for record in earlier] == ["aten.log"]
    assert earlier[0].index < first.index


def test_healing_an_operation_heals_what_follows():
    x = torch.tensor([0.0, 1.0])
    with traced() as trace:
        torch.log(x).sum()
    index = trace.bad[0].index
    with traced(heal=[index]):
        loss = torch.log(x).sum()
    assert torch.isfinite(loss)


def test_method_that_is_not_forward_belongs_to_its_module():
    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(2, 2)

        def log_probability(self, x):
            return torch.log(torch.relu(self.body(x)) * 0)

    policy = Policy()
    with traced() as trace:
        loss = policy.log_probability(torch.ones(1, 2)).sum()
    assert origin(trace, loss).module == "<root>"


def test_criterion_with_parameters_is_the_loss():
    class Criterion(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, out):
            return torch.log(out * 0 * self.scale).mean()

    model, criterion = nn.Linear(2, 2), Criterion()
    with traced() as trace:
        loss = criterion(model(torch.ones(1, 2)))
    assert origin(trace, loss).module == "loss"


def test_training_in_another_thread_is_seen():
    import threading

    model, found = nn.Linear(2, 1), []

    def train():
        found.append(torch.log(model(torch.ones(1, 2)) * 0).sum())

    with traced() as trace:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    assert origin(trace, found[0]).op == "aten.log"


SOURCES = {
    "tensor": lambda: torch.tensor([1.0, math.nan]),
    "tensor of numpy": lambda: torch.tensor(numpy.array([1.0, math.nan])),
    "as_tensor": lambda: torch.as_tensor(numpy.array([1.0, math.nan])),
    "asarray": lambda: torch.asarray([1.0, math.nan]),
    "from_numpy": lambda: torch.from_numpy(numpy.array([1.0, math.nan])),
    "new_tensor": lambda: torch.ones(1).new_tensor([1.0, math.nan]),
    "Tensor": lambda: torch.Tensor([1.0, math.nan]),
}


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_data_from_outside_has_the_line_on_which_it_came_in(make):
    with traced() as trace:
        x = make()
        loss = (x * 2).sum()
    found = origin(trace, loss)
    assert (found.phase, found.op) == ("data", "input")
    assert found.site.function == "<lambda>"
    assert found.detail.rows == [[1]]


def test_memory_that_nobody_saw_has_the_line_that_reads_it_first():
    data = bytearray(numpy.array([1.0, math.nan]).tobytes())
    with traced() as trace:
        x = torch.frombuffer(data, dtype=torch.float64)
        y = x * 2  # first use
        loss = y.sum()
    found = origin(trace, loss)
    assert (found.phase, found.op) == ("data", "input")
    assert found.site.line == line_of("first use")


def test_torch_is_not_changed_by_a_trace():
    names = ("tensor", "as_tensor", "from_numpy", "asarray", "frombuffer", "compile", "save")
    before = [getattr(torch, name) for name in names]
    with traced():
        assert [getattr(torch, name) for name in names] == before
        with torch.device("meta"):
            assert torch.tensor([1.0]).is_meta
            assert nn.Linear(2, 2).weight.is_meta
    assert _get_current_dispatch_mode_stack() == []


class Seen(TorchDispatchMode):
    """A mode of the script's."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    """A function mode of the script's."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def a_step():
    x = torch.from_numpy(numpy.ones(2)).requires_grad_()
    torch.autograd.backward((x * torch.tensor(2.0)).log().sum())


def test_modes_of_the_script_see_the_same_as_without_a_trace():
    with Seen() as seen:
        a_step()
    with Called() as called:
        a_step()
    with Seen() as seen_traced, traced():
        a_step()
    with traced(), Called() as called_traced:
        a_step()
    assert seen_traced.ops == seen.ops
    assert called_traced.names == called.names


def test_fake_and_meta_tensors_are_let_through():
    with traced() as trace:
        with FakeTensorMode():
            fake = nn.Linear(3, 2)(torch.ones(4, 3)).sum()
            fake.backward()
        meta = nn.Linear(3, 2, device="meta")(torch.ones(4, 3, device="meta")).sum()
        meta.backward()
        assert (torch.ones(2) * 2).sum() == 4
    trace.resolve()
    assert fake.shape == meta.shape == ()
    assert [record.op for record in trace.records][-2:] == ["aten.mul", "aten.sum"]


def test_compiled_function_is_seen_operation_by_operation():
    compiled = torch.compile(lambda x: torch.log(x * 2).sum(), backend="eager")
    x = torch.tensor([0.0, 1.0])
    with traced() as trace:
        loss = compiled(x)
    assert origin(trace, loss).op == "aten.log"
    assert compiled(x).isinf()


def test_trace_stops_inside_of_a_mode_that_began_later():
    trace = Trace()
    trace.start()
    with Seen() as seen:
        trace.stop()
        assert _get_current_dispatch_mode_stack() == [seen]
        torch.ones(2)
    assert len(seen.ops) == 1
    assert trace.records == []
    assert _get_current_dispatch_mode_stack() == []


def test_trace_that_began_in_a_mode_outlives_it():
    trace = Trace()
    with Seen():
        trace.start()
    trace.stop()
    assert _get_current_dispatch_mode_stack() == []


def test_nothing_is_left_of_a_trace_that_failed():
    class Broken(nn.Module):
        def forward(self, x):
            raise ZeroDivisionError

    trace = Trace()
    trace.start()
    with pytest.raises(ZeroDivisionError), Seen():
        nn.Sequential(nn.Linear(2, 2), Broken())(torch.ones(1, 2))
    trace.stop()
    trace.stop()  # a second time does nothing
    assert _get_current_dispatch_mode_stack() == []
    assert not torch.nn.modules.module._global_forward_hooks
    with traced() as again:
        torch.ones(2).sum()
    assert again.records[-1].inside is None


def test_table_has_every_operation():
    with traced() as trace:
        (torch.ones(2) * 3 - 6).sum()
    rows = trace.table()
    assert [row["op"] for row in rows] == ["aten.ones", "aten.mul", "aten.sub", "aten.sum"]
    assert [row["max"] for row in rows] == [1.0, 3.0, -3.0, -6.0]


def test_path_shows_where_the_range_explodes():
    x = torch.tensor([1.0, 60.0, 2.0])
    with traced() as trace:
        scaled = x * 2.0
        large = torch.exp(scaled)  # the exp
        loss = (large * 0.5).sum()
    sink = trace.writer(loss)
    rows = path_of(producers([sink])[0], [sink], trace)
    assert [row["op"] for row in rows] == ["input", "aten.mul", "aten.exp", "aten.mul", "aten.sum"]
    assert [row["nonfinite"] for row in rows] == [0, 0, 1, 1, 1]
    assert (rows[1]["min"], rows[1]["max"]) == (2.0, 120.0)
    assert rows[2]["line"] == line_of("the exp")
    # What is finite of a bad result is told, too; of a single bad number there is nothing.
    assert rows[2]["max"] == pytest.approx(math.exp(4.0), rel=1e-5)
    assert rows[4]["max"] is None


def test_path_of_many_operations_stays_short():
    x = torch.tensor([0.0])
    with traced() as trace:
        y = torch.log(x)
        for _ in range(200):
            y = y + 1
        loss = y.sum()
    sink = trace.writer(loss)
    rows = path_of(producers([sink])[0], [sink], trace)
    assert len(rows) == 1 + 1 + 24
    assert rows[1]["op"] == "aten.log"
    assert rows[-1]["op"] == "aten.sum"


def test_function_in_the_place_of_torchs_own_is_torchs(monkeypatch):
    real = torch.log
    monkeypatch.setattr(torch, "log", lambda x: real(x))
    with traced() as trace:
        y = torch.log(-torch.ones(2))  # the caller of the stand-in
    found = origin(trace, y)
    assert (found.op, found.site.line) == ("aten.log", line_of("the caller of the stand-in"))


def test_gradients_of_each_sample():
    model = nn.Linear(3, 1)

    def loss(parameters, x, weight):
        return weight * torch.func.functional_call(model, parameters, (x,)).sum() ** 2

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    with traced() as trace:
        found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(
            parameters, torch.ones(4, 3), torch.zeros(4)
        )
        y = 1.0 / found["weight"].flatten(1).norm(dim=1)  # divides by a norm
    made = origin(trace, y)
    assert (made.op, made.site.line) == ("aten.reciprocal", line_of("divides by a norm"))


@pytest.mark.parametrize("lengths", [torch.tensor, tuple])
def test_ctc_is_called_as_without_a_trace(lengths, monkeypatch):
    def step():
        torch.manual_seed(0)
        x = torch.randn(6, 2, 5, requires_grad=True)
        target = torch.tensor([1, 2, 3, 1])
        logs = x.log_softmax(-1)
        loss = F.ctc_loss(logs, target, lengths([6, 5]), lengths([2, 2]))
        loss.backward()
        return loss.detach(), x.grad

    called = []
    plain = ops.with_lengths_as_numbers

    def seen(func, args):
        called.append(str(plain(func, args)[0]))
        return plain(func, args)

    monkeypatch.setattr("nanguard.replay.tracer.ops.with_lengths_as_numbers", seen)
    bare = step()
    with traced() as trace:
        watched = step()
    assert all(map(torch.equal, bare, watched))
    # A kernel for CUDA takes lengths that lie on the CPU as numbers only.
    assert called == ["aten._ctc_loss.default", "aten._ctc_loss_backward.default"]
    assert "aten._ctc_loss" in [record.op for record in trace.records]
