"""Bad input: every error says what, where, and what to do, and nothing is lost."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nanguard import Guard, NonFiniteError, Settings
from nanguard.errors import NanguardError, RecordError, SettingsError, UsageError
from nanguard.findings import Finding, Severity
from nanguard.testing import inject
from tests.training import NAN, Net, Run, batches, differences

if TYPE_CHECKING:
    from pathlib import Path


def guard_for(model: nn.Module | None = None) -> tuple[nn.Module, Guard]:
    model = model or Net()
    return model, Guard(model, torch.optim.AdamW(model.parameters()))


def raised(action: Any) -> NanguardError:
    with pytest.raises(NanguardError) as caught:
        action()
    assert caught.value.what
    assert caught.value.where
    assert caught.value.do
    return caught.value


LOSSES: dict[str, tuple[Any, str]] = {
    "not a scalar": (lambda out: out.sum(1), "the loss has shape (16,), not one value."),
    "no gradient": (lambda out: out.detach().sum(), "the loss has no gradient"),
    "a number": (lambda out: out.sum().item(), "the loss is of type float, not a tensor."),
    "elsewhere": (
        lambda out: torch.empty((), device="meta", requires_grad=True),
        "the loss is on meta, the parameters are on cpu.",
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_none(name: str):
    make, message = LOSSES[name]
    run = Run()
    guard = run.make_guard()
    data = batches(4)
    before = copy.deepcopy(run.model.state_dict())
    for index, batch in enumerate(guard.watch(data)):
        if index == 0:
            before = copy.deepcopy(dict(run.model.named_parameters()))
            error = raised(lambda: guard.backward(make(run.model(batch[0]))))  # noqa: B023
            assert message in str(error)
            assert error.where == "guard.backward(loss)"
            assert differences(dict(run.model.named_parameters()), before) == []
            continue
        guard.backward(run.loss(batch))
        guard.step()
    assert guard.summary().applied == 3, "the run goes on after the mistake was caught"


def test_what_to_do_about_a_vector_of_losses():
    _, guard = guard_for()
    error = raised(lambda: guard.backward(torch.ones(3, requires_grad=True)))
    assert str(error) == (
        "the loss has shape (3,), not one value.\n"
        "  where: guard.backward(loss)\n"
        "  do:    Reduce it first, for example with loss.mean()."
    )


def test_a_model_without_parameters():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    error = raised(lambda: Guard(nn.ReLU(), optimizer))
    assert error.what == "ReLU has no parameters, so there is nothing to protect."


def test_an_optimizer_of_another_model():
    other = torch.optim.AdamW(Net().parameters())
    error = raised(lambda: Guard(Net(), other))
    assert "optimizer 0 (AdamW) holds none of the parameters of Net" in error.what
    model = Net()
    good = torch.optim.AdamW(model.parameters())
    error = raised(lambda: Guard(model, [good, other]))
    assert "optimizer 1 (AdamW)" in error.what


@pytest.mark.parametrize("given", [None, "model", [], [Net(), 3], 7])
def test_something_that_is_no_model(given: Any):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    assert "not a Module or a list of them" in raised(lambda: Guard(given, optimizer)).what


def test_something_that_is_no_optimizer():
    assert "not a Optimizer" in raised(lambda: Guard(Net(), "adam")).what


def test_parameters_that_are_bad_before_the_first_step():
    model = Net()
    with torch.no_grad():
        model.last.bias[1] = NAN
    error = raised(lambda: guard_for(model))
    assert error.what == "parameter last.bias holds a non-finite value before the first step."


def test_a_step_without_backward():
    model, guard = guard_for()
    error = raised(guard.step)
    assert "guard.backward(loss) was not since the last step" in error.what
    x, y = batches(1)[0]
    F.cross_entropy(model(x), y).backward()
    assert "instead of loss.backward()" in raised(guard.step).do


def test_an_optimizer_that_the_guard_does_not_know():
    a, b = Net(), Net()
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (a, b)]
    guard = Guard([a, b], optimizers)
    stranger = torch.optim.AdamW(Net().parameters())
    assert "is not one of the guard's 2 optimizers" in raised(lambda: guard.step(stranger)).what


def test_a_loop_inside_of_a_loop():
    _, guard = guard_for()
    for _ in guard.watch([1]):
        error = raised(lambda: next(iter(guard.watch([2]))))
        assert "already watched" in error.what
        assert "evaluation" in error.do


def test_something_that_cannot_be_iterated_over():
    _, guard = guard_for()
    assert raised(lambda: next(iter(guard.watch(5)))).what == "int cannot be iterated over."


def test_loss_terms_must_be_given_and_be_numbers():
    _, guard = guard_for()
    assert "without a loss term" in raised(guard.loss).what
    error = raised(lambda: guard.loss(text=torch.ones(2)))
    assert error.where == "guard.loss(text=...)"


def test_too_many_loss_terms():
    _, guard = guard_for()
    terms = {f"term{i}": torch.ones(()) for i in range(80)}
    error = raised(lambda: guard.loss(**terms))
    assert "a guard follows 64 numbers at most" in error.what


def test_an_iterator_that_fails_half_way_loses_nothing():
    def broken() -> Any:
        yield from batches(5)
        raise OSError("the disk is gone")

    run = Run()
    guard = run.make_guard(lag=2)
    with pytest.raises(OSError, match="the disk is gone"):
        for batch in guard.watch(broken()):
            guard.backward(run.loss(batch))
            guard.step(max_norm=1.0)
    assert guard.summary().applied == 5
    assert differences(run.everything(), Run().bare(batches(5)).everything()) == []


def test_an_ema_that_cannot_be_updated():
    model = Net()
    error = raised(lambda: Guard(model, torch.optim.AdamW(model.parameters()), ema=Net()))
    assert "does not know how to update an EMA of type Net" in error.what
    error = raised(lambda: Guard(model, torch.optim.AdamW(model.parameters()), ema=(Net(),)))
    assert "ema is a tuple of 1" in error.what


@pytest.mark.parametrize(
    ("setting", "value", "wanted"),
    [
        ("max_skips", -1, "a whole number of at least 0"),
        ("max_skips", 1.5, "a whole number of at least 0"),
        ("max_skips", True, "a whole number of at least 0"),
        ("recent", 0, "a whole number of at least 1"),
        ("lr_cut", 0.0, "a number in (0, 1]"),
        ("lr_cut", 2, "a number in (0, 1]"),
        ("lr_floor", NAN, "a number in (0, 1]"),
        ("on_bad", "ignore", "one of ('skip', 'rollback', 'stop')"),
        ("spike_act", 1.0, "at least spike_warn (6)"),
        ("spike_warmup", 500, "at most spike_window (128)"),
        ("lag", -2, "a whole number of at least 0"),
    ],
)
def test_settings_outside_their_range(setting: str, value: Any, wanted: str):
    with pytest.raises(SettingsError) as caught:
        Settings(**{setting: value})
    assert f"{setting} is {value!r}, but it has to be {wanted}." == caught.value.what


def test_a_run_folder_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    model = Net()
    with pytest.raises(RecordError) as caught:
        Guard(model, torch.optim.AdamW(model.parameters()), run_dir=tmp_path / "file" / "run")
    assert "cannot be written to (Not a directory)" in caught.value.what
    assert str(tmp_path / "file" / "run") == caught.value.where


READ_ONLY = """
import os, sys, torch
from nanguard import Guard
from nanguard.errors import RecordError
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
Guard(model, optimizer)
if os.geteuid() == 0:
    os.setgid(65534), os.setuid(65534)  # root may write anywhere
try:
    Guard(model, optimizer, run_dir=sys.argv[1])
except RecordError as error:
    print(error)
"""


def test_a_read_only_run_folder(tmp_path: Path):
    tmp_path.chmod(0o555)
    command = [sys.executable, "-c", READ_ONLY, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == (
        "the run folder cannot be written to (Permission denied).\n"
        f"  where: {tmp_path / 'run'}\n"
        "  do:    Give a run_dir that exists or can be made and that this user may write to, or "
        "leave run_dir out to keep no record.\n"
    ), done.stderr


def test_injecting_where_nothing_is():
    _, guard = guard_for()
    with (
        pytest.raises(
            UsageError, match="'nowhere' cannot be spoilt: that parameter does not exist"
        ),
        inject(guard, "nan", into="gradient", parameter="nowhere", step=0),
    ):
        pass


def test_errors_survive_pickling():
    finding = Finding("RUN001", "non-finite-loss", Severity.ERROR, "the loss is nan", step=3)
    error = pickle.loads(pickle.dumps(NonFiniteError(finding, do="look")))
    assert error.finding == finding
    assert str(error) == "the loss is nan\n  where: step 3\n  do:    look"
    other = pickle.loads(pickle.dumps(UsageError("what", where="where", do="do")))
    assert isinstance(other, ValueError)
    assert str(other) == "what\n  where: where\n  do:    do"
