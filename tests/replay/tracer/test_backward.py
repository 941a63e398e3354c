"""Backward is told from forward in every thread, and knows the lines of forward."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _push_mode
from torch.utils.checkpoint import checkpoint

from nanguard.replay.tracer import trace as tracing
from tests.replay.tracer.test_trace import line_of as line_in
from tests.replay.tracer.test_trace import origin, traced

# On a device the engine runs in a thread whose stack holds none of its frames, nor the user's.
ENGINE = """
def run_backward(push, trace, engine, loss, grad):
    push(trace)
    engine.run_backward(
        (loss,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
"""


def line_of(text):
    return line_in(text, __file__)


def in_device_thread(trace, loss):
    """Runs a backward as a device does."""
    names = {}
    exec(compile(ENGINE, "<engine>", "exec"), names)
    engine, grad = torch.autograd.Variable._execution_engine, torch.ones_like(loss)
    failed = []

    def hook(args):
        failed.append(args.exc_value)

    before, threading.excepthook = threading.excepthook, hook
    given = (_push_mode, trace, engine, loss, grad)
    thread = threading.Thread(target=names["run_backward"], args=given)
    thread.start()
    thread.join()
    threading.excepthook = before
    assert failed == []
    trace.end_backward()


def in_this_thread(trace, loss):
    loss.backward()
    trace.end_backward()


def in_fresh_thread(call):
    """Runs something where the numbers of nodes begin at 0, and returns what it returns."""
    found = []

    def run():
        found.append(call())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


both = pytest.mark.parametrize("backward", [in_this_thread, in_device_thread])


class Root(nn.Module):
    def forward(self, x):
        return torch.sqrt((x * x).sum(1))  # the root


@both
def test_line_and_module_are_those_of_forward(backward):
    model = nn.Sequential(nn.Linear(3, 3, bias=False), Root())
    with traced() as trace:
        loss = model(torch.zeros(4, 3)).mean()
        backward(trace, loss)
    found = origin(trace, model[0].weight.grad, "gradient")
    assert (found.phase, found.op, found.module) == ("backward", "aten.sqrt", "1")
    assert found.site.line == line_of("the root")
    phases = [record.phase for record in trace.records]
    assert set(phases) == {"forward", "backward"}
    assert phases == sorted(phases, reverse=True)


@both
def test_derivative_of_a_view_has_the_line_of_the_view(backward):
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float16))
    with traced() as trace:
        many = weight.expand(4)  # the view
        # Each of the four gradients is finite, and their sum is not.
        loss = (many * torch.full((4,), 3e4, dtype=torch.float16)).sum()
        backward(trace, loss)
    found = origin(trace, weight.grad, "gradient")
    assert (found.phase, found.op, found.kernel) == ("backward", "aten.expand", "aten.sum")
    assert found.site.line == line_of("the view")


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad / x  # own derivative


class Layer(nn.Module):
    def forward(self, x):
        return Own.apply(x)


@both
def test_backward_that_the_user_wrote_is_backward(backward):
    weight, model = nn.Parameter(torch.tensor([0.0, 1.0])), nn.Sequential(Layer())
    model.register_parameter("weight", weight)
    with traced() as trace:
        loss = model(weight).sum()
        backward(trace, loss)
    found = origin(trace, weight.grad, "gradient")
    assert (found.phase, found.op, found.module) == ("backward", "aten.div", "0")
    assert found.site.line == line_of("own derivative")


@both
def test_hook_is_backward(backward):
    weight = nn.Parameter(torch.tensor([0.0, 1.0]))
    with traced() as trace:
        y = weight * 1.0
        y.register_hook(lambda grad: grad / weight.detach())  # the hook
        backward(trace, y.sum())
    found = origin(trace, weight.grad, "gradient")
    assert (found.phase, found.op) == ("backward", "aten.div")
    assert found.site.line == line_of("the hook")


@both
def test_optimizer_in_a_hook_is_the_optimizer(backward):
    weight = nn.Parameter(torch.tensor([0.0, 1.0]))

    def update(parameter):
        trace.in_optimizer = True
        parameter.data.log_()
        trace.in_optimizer = False

    weight.register_post_accumulate_grad_hook(update)
    with traced() as trace:
        backward(trace, (weight * 2.0).sum())
    found = origin(trace, weight, "parameter")
    assert (found.phase, found.op) == ("optimizer", "aten.log_")


@both
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_is_forward(backward, reentrant):
    model = nn.Sequential(nn.Linear(3, 3, bias=False), Root())
    with traced() as trace:
        x = torch.zeros(4, 3, requires_grad=True)
        loss = checkpoint(model, x, use_reentrant=reentrant).mean()
        backward(trace, loss)
    found = origin(trace, model[0].weight.grad, "gradient")
    assert (found.phase, found.op) == ("backward", "aten.sqrt")
    assert found.site.line == line_of("the root")
    roots = [record for record in trace.records if record.op == "aten.sqrt"]
    assert [record.phase for record in roots] == ["forward", "forward"]
    assert {record.place[2] for record in roots} == {line_of("the root")}
    assert {trace.path_of(record) for record in roots} == {"1"}


class Checkpointed(torch.autograd.Function):
    """A framework's own way to compute something again."""

    @staticmethod
    def forward(ctx, run, x):
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.run(x)
        torch.autograd.backward(out, grad)
        return None, x.grad


@both
def test_frameworks_compute_again_in_their_own_way(backward):
    model = Root()
    with traced() as trace:
        x = torch.zeros(4, 3, requires_grad=True)
        loss = Checkpointed.apply(model, x).mean()
        backward(trace, loss)
    found = origin(trace, x.grad, "gradient")
    assert (found.phase, found.op) == ("backward", "aten.sqrt")
    roots = [record for record in trace.records if record.op == "aten.sqrt"]
    assert [record.phase for record in roots] == ["forward", "forward"]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("functions", [("exp", "exp", "exp", "exp"), ("exp", "log", "exp", "tan")])
def test_numbers_of_nodes_clash_between_threads(reentrant, functions):
    first, second, third, last = (getattr(torch, name) for name in functions)

    def inner(x):
        x = first(x)  # first
        x = second(x)  # second
        return third(x)  # third

    def forward():
        _push_mode(trace)
        weight = nn.Parameter(torch.zeros(3))
        y = checkpoint(inner, weight * 1.0, use_reentrant=reentrant)
        return last(y).sum()  # last

    with traced() as trace:
        loss = in_fresh_thread(forward)
        in_device_thread(trace, loss)
    assert max(map(len, trace._nodes._made_for.values())) > 1, (
        "nothing clashed, so nothing was tested"
    )
    lines = [r.place[2] for r in trace.records if r.forward and r.forward[5:] in functions]
    lines = [line for line, _ in itertools.groupby(lines)]
    assert lines == [line_of(text) for text in ("last", "third", "second", "first")]


def test_models_are_not_entered_again_in_backward():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    with traced() as trace:
        x = torch.ones(4, 3, requires_grad=True)
        loss = checkpoint(model, x, use_reentrant=True).mean()
        entered = len(trace.entered)
        in_device_thread(trace, loss)
    assert len(trace.entered) == entered
    ops = [record.index for record in trace.records]
    assert ops == sorted(set(ops))


def test_threads_share_a_trace():
    def work():
        _push_mode(trace)
        x = torch.ones(2)
        for _ in range(200):
            x = x * 1.0

    with traced() as trace:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    indices = [record.index for record in trace.records]
    assert len(indices) == len(set(indices)) == 4 * 201


def test_thread_is_let_through_after_the_end():
    model, go, done = nn.Linear(2, 1), threading.Event(), []

    def train():
        model(torch.ones(1, 2))
        ready.set()
        go.wait()
        done.append(torch.log(torch.zeros(1)))

    ready = threading.Event()
    thread = threading.Thread(target=train)
    with traced() as trace:
        thread.start()
        ready.wait()
    count = len(trace.records)
    go.set()
    thread.join()
    assert len(trace.records) == count
    assert done[0].isinf().all()
    assert not torch.utils._python_dispatch._is_in_torch_dispatch_mode
    assert tracing.Trace().records == []
