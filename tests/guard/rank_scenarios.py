"""What two ranks do together; started by torchrun from test_ranks.py.

    torchrun --nproc-per-node=2 -m tests.guard.rank_scenarios ddp OUT.json

Every scenario trains a model with one bad rank and the same model without the bad step, and
writes what came of it. A scenario that hangs is ended by a watchdog that says so.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from nanguard import Guard, NonFiniteError, Settings
from nanguard.errors import SnapshotError
from nanguard.numerics import local, whole
from nanguard.testing import inject
from tests.training import NAN, Net, batches, seed_all

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # its place before torch 2.6
    from torch.distributed._composable.fsdp import fully_shard

SECONDS = 100
WARM = {"spike_warmup": 16, "spike_window": 16, "max_skips": 20, "snapshot_every": 0}


class Smooth(nn.Module):
    """A model without BatchNorm, whose statistics FSDP and DDP treat differently."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(8, 24), nn.Dropout(0.1), nn.Linear(24, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(F.gelu(self.first(x))))


def build(form: str) -> nn.Module:
    seed_all(0)
    if form == "ddp":
        return DistributedDataParallel(Net())
    model = Smooth()
    if form == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model.first, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Returns a fingerprint of weights and optimizer state, whole on every rank."""
    found = hashlib.sha256()
    tensors = [p.detach() for p in model.parameters()]
    for state in optimizer.state_dict()["state"].values():
        tensors += [value for value in state.values() if torch.is_tensor(value)]
    for tensor in tensors:
        found.update(whole(tensor).contiguous().numpy().tobytes())
    return found.hexdigest()


def own(model: nn.Module) -> str:
    """Returns a fingerprint of what each rank has for itself: buffers and random numbers."""
    found = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for tensor in model.buffers():
        found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def my_batches(count: int, extra: int = 0) -> list[Any]:
    rank = dist.get_rank()
    return batches(count + extra, seed=10 + rank)


def train(
    form: str,
    data: Any,
    *,
    fused: bool = True,
    fault: dict[str, Any] | None = None,
    accumulate: int = 1,
    run_dir: Path | None = None,
    **settings: Any,
) -> dict[str, Any]:
    model = build(form)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    seed_all(100 + dist.get_rank())
    guard = Guard(model, optimizer, run_dir=run_dir, settings=Settings(**{**WARM, **settings}))
    stopped = None
    try:
        context = inject(guard, **fault) if fault else torch.enable_grad()
        with context:
            for index, (x, y) in enumerate(guard.watch(data)):
                guard.backward(F.cross_entropy(model(x), y) / accumulate)
                if (index + 1) % accumulate == 0:
                    guard.step(max_norm=1.0)
    except NonFiniteError as error:
        stopped = error.finding.name
    guard.close()
    summary = guard.summary()
    return {
        "digest": digest(model, optimizer),
        "own": own(model),
        "stopped": stopped,
        **summary.counts(),
        "events": [e.finding.name for e in summary.events],
        "messages": [e.finding.message for e in summary.events],
        "steps_of_events": [e.finding.step for e in summary.events],
        "bad_ranks": [e.finding.rank for e in summary.events],
    }


def compare(form: str, fault: dict[str, Any], *, drop: tuple[int, ...], **options: Any) -> Any:
    """Trains with a fault on rank 1 only, and without the batches it spoilt."""
    count = options.pop("count", 24)
    accumulate = options.get("accumulate", 1)
    data = my_batches(count)
    left = [b for i, b in enumerate(data) if i // accumulate not in drop]
    bad = train(form, data, fault={"rank": 1, **fault}, **options)
    clean = train(form, left, **options)
    return {"bad": bad, "clean": clean}


def columns(form: str) -> dict[str, Any]:
    """Returns the scenarios of every fault, with the host in time and late."""
    scenarios: dict[str, Any] = {}
    for lag in (0, 2):
        for fused in (True, False) if lag else (True,):
            label = f"lag {lag}, {'fused' if fused else 'foreach'}"
            more = {"lag": lag, "fused": fused}
            for fault in ("nan", "inf", "-inf"):
                for into in ("input", "loss", "gradient"):
                    scenarios[f"{fault} in {into}, {label}"] = lambda f=fault, i=into, m=more: (
                        compare(form, {"fault": f, "into": i, "step": (3, 9)}, drop=(3, 9), **m)
                    )
            scenarios[f"spike in loss, {label}"] = lambda m=more: compare(
                form,
                {"fault": "spike", "into": "loss", "step": 20, "factor": 1e4},
                drop=(20,),
                **m,
            )
    scenarios["bad first and last step"] = lambda: compare(
        form, {"fault": "nan", "into": "loss", "step": (0, 23)}, drop=(0, 23), lag=2
    )
    scenarios["accumulation"] = lambda: compare(
        form, {"fault": "nan", "into": "loss", "step": (2, 5)}, drop=(2, 5), lag=2, accumulate=3
    )
    scenarios["parameter after step"] = lambda: parameter_after_step(form)
    scenarios["stop"] = lambda: train(
        form,
        my_batches(12),
        fault={"fault": "nan", "into": "loss", "step": 4, "rank": 1},
        on_bad="stop",
        lag=2,
    )
    scenarios["rollback"] = lambda: train(
        form,
        my_batches(24),
        fault={"fault": "nan", "into": "input", "step": 13, "rank": 1},
        on_bad="rollback",
        snapshot_every=5,
        lag=2,
    )
    scenarios["loss bad, gradient good"] = lambda: loss_only(form)
    scenarios["uneven, sized"] = lambda: uneven(form, sized=True)
    scenarios["uneven, unsized"] = lambda: uneven(form, sized=False)
    scenarios["uneven last batch size"] = lambda: uneven_size(form)
    scenarios["resume from disk"] = lambda: resume(form)
    scenarios["no memory on one rank"] = lambda: no_memory(form)
    if form == "fsdp":
        scenarios["poison on one shard"] = poison_on_one_shard
    return scenarios


def parameter_after_step(form: str) -> Any:
    """An optimizer writes NaN from finite gradients on every rank; the run rolls back."""
    model = build(form)

    class Broken(torch.optim.SGD):
        calls = 0

        def step(self, closure: Any = None) -> None:
            super().step()
            Broken.calls += 1
            if Broken.calls == 8:
                parameter = self.param_groups[0]["params"][0]
                with torch.no_grad():
                    values = local(parameter)
                    if dist.get_rank() == 0 or form == "ddp":
                        values.view(-1)[0] = NAN

    optimizer = Broken(model.parameters(), lr=1e-2)
    settings = Settings(**{**WARM, "snapshot_every": 3, "scan_every": 4})
    guard = Guard(model, optimizer, settings=settings)
    for x, y in guard.watch(my_batches(14)):
        guard.backward(F.cross_entropy(model(x), y))
        guard.step(max_norm=1.0)
    finite = all(bool(torch.isfinite(local(p)).all()) for p in model.parameters())
    summary = guard.summary()
    return {
        "finite": finite,
        "events": [e.finding.name for e in summary.events],
        "steps_of_events": [e.finding.step for e in summary.events],
        "rollbacks": summary.rollbacks,
        "digest": digest(model, optimizer),
    }


def loss_only(form: str) -> Any:
    """One rank's loss is inf by a constant, with finite gradients: all ranks must skip it."""
    results = {}
    for poison in (True, False):
        model = build(form)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        seed_all(100 + dist.get_rank())
        guard = Guard(model, optimizer, settings=Settings(**{**WARM, "lag": 2}))
        data = list(enumerate(my_batches(10)))
        if not poison:
            del data[4]
        for index, (x, y) in guard.watch(data):
            extra = torch.tensor(float("inf") if index == 4 and dist.get_rank() == 1 else 0.0)
            guard.backward(F.cross_entropy(model(x), y) + extra)
            guard.step(max_norm=1.0)
        guard.close()
        summary = guard.summary()
        results["bad" if poison else "clean"] = {
            "digest": digest(model, optimizer),
            "own": own(model),
            "skipped": summary.skipped,
            "messages": [e.finding.message for e in summary.events],
            "bad_ranks": [e.finding.rank for e in summary.events],
        }
    return results


def uneven(form: str, *, sized: bool) -> Any:
    """One rank has more batches than the other; the last one both have is bad."""
    data = my_batches(10, extra=3 * dist.get_rank())
    source = data if sized else iter(data)
    return train(form, source, fault={"fault": "nan", "into": "loss", "step": 9, "rank": 0}, lag=2)


def uneven_size(form: str) -> Any:
    data = my_batches(8)
    if dist.get_rank() == 1:
        x, y = data[-1]
        data[-1] = (x[:3].clone(), y[:3].clone())
    return train(form, data, fault={"fault": "nan", "into": "input", "step": 7, "rank": 1}, lag=2)


def resume(form: str) -> Any:
    """A run that is left and resumed ends like the run that was not."""
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    results = {}
    for kind in ("whole", "resumed"):
        folder = Path(shared[0]) / kind
        for attempt in range(2 if kind == "resumed" else 1):
            model = build(form)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
            seed_all(100 + dist.get_rank() + 50 * attempt)
            settings = Settings(**{**WARM, "snapshot_every": 4, "disk_every": 4, "lag": 2})
            guard = Guard(model, optimizer, run_dir=folder, settings=settings)
            resumed = guard.resume()
            loader = torch.utils.data.DataLoader(my_batches(20), batch_size=None, shuffle=True)
            for index, (x, y) in enumerate(guard.watch(loader)):
                guard.backward(F.cross_entropy(model(x), y))
                guard.step(max_norm=1.0)
                if kind == "resumed" and attempt == 0 and index == 10:
                    break
            guard.close()
        results[kind] = {
            "digest": digest(model, optimizer),
            "resumed": resumed,
            "own": own(model),
        }
    return results


def no_memory(form: str) -> Any:
    """One rank has no room for snapshots, so none has one, and all of them stop alike."""
    from nanguard.snapshots.manager import Recovery

    original = Recovery.is_ready
    if dist.get_rank() == 1:
        Recovery.is_ready = lambda _self, _update: False  # type: ignore[method-assign]
    try:
        return train(
            form,
            my_batches(12),
            fault={"fault": "nan", "into": "loss", "step": 7, "rank": 0},
            on_bad="rollback",
            snapshot_every=2,
        )
    finally:
        Recovery.is_ready = original  # type: ignore[method-assign]


def poison_on_one_shard() -> Any:
    """A parameter that the loss does not see turns bad in the shard of one rank only."""
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    model = build("fsdp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    settings = Settings(
        **{**WARM, "snapshot_every": 2, "disk_every": 2, "scan_every": 1000, "lag": 2}
    )
    written: list[list[str]] = []

    def look(_event: Any) -> None:
        written.append(sorted(p.name for p in (Path(shared[0]) / "snapshots").iterdir()))

    guard = Guard(model, optimizer, run_dir=shared[0], settings=settings, on_event=look)
    for index, (x, y) in enumerate(guard.watch(my_batches(14))):
        guard.backward(F.cross_entropy(model(x), y))
        guard.step(max_norm=1.0)
        if index == 5 and dist.get_rank() == 1:
            state = optimizer.state[next(iter(model.parameters()))]["exp_avg_sq"]
            local(state).view(-1)[0] = float("inf")  # the weights themselves stay finite
    guard.close()
    summary = guard.summary()
    return {
        "events": [e.finding.name for e in summary.events],
        "rollbacks": summary.rollbacks,
        "digest": digest(model, optimizer),
        "written": written[0],
    }


def scaler_scenarios() -> dict[str, Any]:
    """A GradScaler makes NaN gradients mean overflow, so the verdict takes another way."""

    def train_scaled(data: list[Any], bad: tuple[int, ...]) -> Any:
        model = build("ddp")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        seed_all(100 + dist.get_rank())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4)
        guard = Guard(model, optimizer, scaler=scaler, settings=Settings(**WARM))
        with inject(guard, "nan", into="loss", step=bad, rank=1):
            for x, y in guard.watch(data):
                guard.backward(F.cross_entropy(model(x), y))
                guard.step(max_norm=1.0)
        guard.close()
        counts = guard.summary().counts()
        return {
            "digest": digest(model, optimizer),
            "own": own(model),
            "scale": scaler.get_scale(),
            **counts,
        }

    def scenario() -> Any:
        data = my_batches(12)
        left = [b for i, b in enumerate(data) if i not in (2, 7)]
        return {"bad": train_scaled(data, (2, 7)), "clean": train_scaled(left, ())}

    return {
        "grad scaler": scenario,
        "plain model": plain_model,
        "state on one rank": state_on_one_rank,
        "plateau": plateau,
        "folders of their own": folders_of_their_own,
    }


def state_on_one_rank() -> Any:
    """Rank 0 alone takes a checkpoint after every step, while a cut learning rate climbs back."""
    model = build("ddp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    settings = Settings(lag=2, max_skips=0, lr_climb_after=3, snapshot_every=0)
    guard = Guard(model, optimizer, settings=settings)
    with inject(guard, "nan", into="loss", step=6):
        for x, y in guard.watch(my_batches(16)):
            guard.backward(F.cross_entropy(model(x), y))
            guard.step()
            if dist.get_rank() == 0:
                guard.state_dict()
    guard.close()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    both = [torch.empty_like(weights) for _ in range(2)]
    dist.all_gather(both, weights)
    return {"same": torch.equal(*both), **guard.summary().counts()}


def plateau() -> Any:
    """The ranks have different losses; their schedulers must not draw different conclusions."""
    model = build("ddp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.03)
    guard = Guard(
        model, optimizer, scheduler=scheduler, scheduler_every="epoch", settings=Settings(**WARM)
    )
    for _ in range(8):
        for x, y in guard.watch(my_batches(4)):
            guard.backward(F.cross_entropy(model(x), y))
            guard.step()
        guard.end_epoch()
    guard.close()
    return {"lr": optimizer.param_groups[0]["lr"]}


def folders_of_their_own() -> Any:
    """Machines without a shared disk: only the first rank finds a snapshot."""
    folder, error = tempfile.mkdtemp(), ""
    for _ in range(2):
        model = build("ddp")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        settings = Settings(**{**WARM, "snapshot_every": 4, "disk_every": 4})
        guard = Guard(model, optimizer, run_dir=folder, settings=settings)
        try:
            guard.resume()
        except SnapshotError as failed:
            error = str(failed)
            break
        for x, y in guard.watch(my_batches(6)):
            guard.backward(F.cross_entropy(model(x), y))
            guard.step()
        guard.close()
    return {"told": error}


def plain_model() -> Any:
    """No DDP: the loop reduces gradients by hand, so the guard asks the ranks by itself."""
    results = {}
    for poison in (True, False):
        model = build("plain")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        seed_all(100 + dist.get_rank())
        guard = Guard(model, optimizer, settings=Settings(**WARM))
        data = list(enumerate(my_batches(10)))
        if not poison:
            del data[4]
        for index, (x, y) in guard.watch(data):
            extra = torch.tensor(float("inf") if index == 4 and dist.get_rank() == 1 else 0.0)
            guard.backward(F.cross_entropy(model(x), y) + extra)
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            guard.step(max_norm=1.0)
        results["bad" if poison else "clean"] = {
            "digest": digest(model, optimizer),
            "own": own(model),
            "skipped": guard.summary().skipped,
        }
        guard.close()
    return results


def main() -> None:
    form, out = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    dist.init_process_group("gloo")
    scenarios = scaler_scenarios() if form == "other" else columns(form)
    results: dict[str, Any] = {}
    for name, scenario in scenarios.items():
        try:
            mine = scenario()
        except Exception:
            traceback.print_exc()
            mine = {"error": traceback.format_exc()}
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        results[name] = everyone
        if dist.get_rank() == 0:
            out.write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
