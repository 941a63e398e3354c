"""The promises that only a GPU can show. Run on a CUDA machine; skipped elsewhere."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from nanguard import Guard, Settings
from nanguard.guard.gate import Gate
from nanguard.guard.rng import RandomStreams
from nanguard.signals import LARGEST
from tests.training import QUIET, Net, Run, adamw, batches, differences, poisoned, without

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]

BAD = (0, 1, 7, 8, 20, 39)
OPTIMIZERS = {
    "adamw fused": adamw(fused=True),
    "adamw foreach": adamw(foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "sgd fused, no momentum": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "adagrad foreach": lambda p: torch.optim.Adagrad(p, lr=0.1, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}


@pytest.mark.parametrize("lag", [None, 0, 1, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_with_bad_batches_ends_bit_identical_to_one_without(name: str, lag: int | None):
    data = batches(40, device="cuda")
    clean = Run(OPTIMIZERS[name], "cuda").bare(without(data, BAD))
    expected = clean.everything()
    run = Run(OPTIMIZERS[name], "cuda").guarded(poisoned(data, BAD), lag=lag)
    assert differences(run.everything(), expected) == []
    assert run.guard.summary().skipped == len(BAD)


@pytest.mark.parametrize("scaled", [False, True])
def test_no_host_sync_on_the_healthy_path(scaled: bool):
    """Through scans, spike windows, snapshots, an EMA, a schedule and named terms."""
    model = Net().cuda()
    average = copy.deepcopy(model)

    def update() -> None:  # torch's own AveragedModel reads its counter from the device
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.1)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    scaler = torch.amp.GradScaler("cuda", init_scale=128.0) if scaled else None
    settings = Settings(scan_every=4, spike_warmup=16, snapshot_every=5)
    guard = Guard(
        model,
        optimizer,
        scheduler=schedule,
        scaler=scaler,
        ema=(average, update),
        settings=settings,
    )
    for index, (x, y) in enumerate(guard.watch(batches(60, device="cuda"))):
        if index == 30:
            torch.cuda.set_sync_debug_mode("error")
        out = model(x)
        guard.backward(guard.loss(main=F.cross_entropy(out, y), size=1e-3 * out.pow(2).mean()))
        guard.step(max_norm=1.0)
        if index == 57:
            torch.cuda.set_sync_debug_mode("default")
    guard.close()
    assert guard.summary().applied == 60
    assert guard.summary().snapshots == 12
    assert guard.summary().rerun == 0


def test_the_sync_alarm_does_ring_for_a_host_check():
    run = Run(device="cuda")
    x, y = batches(1, device="cuda")[0]
    loss = F.cross_entropy(run.model(x), y)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            bool(torch.isfinite(loss))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_snapshot_is_copied_beside_the_training_and_rolls_back():
    data = batches(40, device="cuda")
    run = Run(device="cuda", with_ema=False)
    guard = run.make_guard(snapshot_every=10, on_bad="rollback", max_rollbacks=5)
    states = {}
    for index, batch in enumerate(guard.watch(poisoned(data, [25]))):
        guard.backward(run.loss(batch))
        guard.step(max_norm=1.0)
        if guard.updates == 20 and 20 not in states and index < 25:
            states[20] = {k: v.clone() for k, v in run.model.state_dict().items()}
        if guard.summary().rollbacks:
            break
    assert differences(dict(run.model.state_dict()), states[20]) == []


def test_fp16_overflow_is_left_to_the_scaler_and_a_nan_loss_is_not():
    data = batches(30, device="cuda")

    def train(data: list, *, guarded: bool):
        torch.manual_seed(0)
        model = Net().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24, growth_interval=5)
        guard = (
            Guard(model, optimizer, scaler=scaler, settings=Settings(**QUIET)) if guarded else None
        )
        for x, y in guard.watch(data) if guard else data:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            if guard:
                guard.backward(loss)
                guard.step(max_norm=1.0)
                continue
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return model, optimizer, scaler, guard

    bad = (6, 7, 20)
    model, optimizer, scaler, guard = train(poisoned(data, bad), guarded=True)
    clean_model, clean_optimizer, clean_scaler, _ = train(without(data, bad), guarded=False)
    assert differences(model.state_dict(), clean_model.state_dict()) == []
    assert differences(optimizer.state_dict(), clean_optimizer.state_dict()) == []
    assert scaler.state_dict() == clean_scaler.state_dict()
    assert guard.summary().skipped == len(bad)
    assert guard.summary().overflows > 0


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("norm", [2.0, 3e38, math.inf, math.nan])
@pytest.mark.parametrize("loss", [1.0, -3e38, -math.inf, math.inf, math.nan])
def test_the_quick_look_at_a_step_comes_to_the_same_verdict(loss: float, norm: float, closed: bool):
    numbers = torch.tensor([loss, norm], device="cuda")
    verdicts = []
    for limit in (LARGEST, 3.2e38):  # below the largest number there is: the long way
        gate = Gate(torch.device("cuda"))
        gate.set(closed=closed)
        gate.write_step(numbers[0], numbers[1])
        gate.judge(limit, limit)
        told = gate.post(("latch", "loss", "grad_norm")).read()
        verdicts.append(told["latch"])
        assert str([told["loss"], told["grad_norm"]]) == str(numbers.tolist())
    assert verdicts[0] == verdicts[1] == float(closed or not torch.isfinite(numbers).all())


def test_the_streams_of_a_device_are_put_back():
    streams = RandomStreams([torch.device("cuda", 0)])
    torch.rand(7, device="cuda")
    before = streams.capture()
    first = [torch.rand(5, device="cuda"), F.dropout(torch.ones(100, device="cuda"))]
    torch.cuda.manual_seed(99)
    streams.restore(before)
    again = [torch.rand(5, device="cuda"), F.dropout(torch.ones(100, device="cuda"))]
    assert all(map(torch.equal, first, again))
    state = torch.cuda.get_rng_state()
    streams.restore({**before, "cuda": [state]})  # as earlier versions have saved it
    assert torch.equal(torch.cuda.get_rng_state(), state)
