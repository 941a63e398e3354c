"""What two ranks do together in each form; started by torchrun from test_contract.py.

    torchrun --nproc-per-node=2 -m tests.integrations.two_ranks OUT

One rank has a bad batch. Every form trains with it, and without it on both ranks.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel

from nanguard import Guard
from nanguard.guard.driven import Driven
from nanguard.integrations.accelerate import guard_for
from tests.integrations import forms
from tests.integrations.forms import Asked, Ended
from tests.integrations.tiny import SIZE, samples, spoil, without

SECONDS = 240
BATCHES, BAD, RANK = 6, 3, 1


def own(data: list[Any]) -> list[Any]:
    """Returns what this rank reads of data whose batches go to the ranks in turn."""
    return [s for i, s in enumerate(data) if i // SIZE % 2 == dist.get_rank()]


def plain(asked: Asked) -> Ended:
    model, optimizer, scheduler = forms.build()
    wrapped = DistributedDataParallel(model)
    options = {"settings": forms.SETTINGS, **asked.options}
    with Guard(wrapped, optimizer, scheduler=scheduler, **options) as guard:
        for batch in guard.watch(forms.loader_of(own(asked.data))):
            guard.backward(wrapped(**batch)["loss"])
            guard.step(max_norm=1.0)
    return Ended(model, optimizer, scheduler, guard)


def lightning(asked: Asked) -> Ended:
    return forms.lightning(Asked(asked.folder, own(asked.data), options=asked.options))


def digest(ended: Ended) -> str:
    found = hashlib.sha256()
    states = [ended.model.state_dict(), *ended.optimizer.state_dict()["state"].values()]
    for state in states:
        for value in state.values():
            found.update(torch.as_tensor(value).contiguous().numpy().tobytes())
    return found.hexdigest()


def told(form: str, asked: Asked) -> dict[str, Any]:
    ended = forms.run(form, asked)
    events = ended.guard.summary().events
    return {
        "digest": digest(ended),
        "lr": ended.scheduler.get_last_lr(),
        "events": [
            (e.finding.step, e.finding.name, e.finding.rank, e.action.value) for e in events
        ],
    }


def streams() -> dict[str, Any]:
    """Returns what a rank draws after it has gone on from the state of the first one."""
    rank = dist.get_rank()
    model, optimizer, _ = forms.build()
    wrapped = DistributedDataParallel(model)
    drawn = {}
    for name, make in {"alone": Guard, "together": Driven}.items():
        torch.manual_seed(rank)
        made = make(wrapped, optimizer)
        torch.manual_seed(rank)
        told = [made.state_dict()]
        drawn["saved"] = float(torch.rand(()))
        dist.broadcast_object_list(told, 0)
        made.load_state_dict(told[0])
        drawn[name] = float(torch.rand(()))
        made.close()
    return drawn


def saved_by_the_first_rank(folder: Path) -> bool:
    """Returns whether the main process can save by itself, as many scripts do."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, _ = forms.build()
    wrapped, prepared = accelerator.prepare(model, optimizer)
    with guard_for(accelerator, wrapped, prepared):
        if accelerator.is_main_process:
            accelerator.save_state(str(folder / "alone"))
        accelerator.wait_for_everyone()
        accelerator.load_state(str(folder / "alone"))
    return True


def main(out: Path) -> None:
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    dist.init_process_group("gloo")
    forms.FORMS |= {"plain": plain, "lightning": lightning}
    data = samples(2 * BATCHES)
    bad = spoil(data, {2 * BAD + RANK: "nan-input"})
    clean = without(data, {2 * BAD, 2 * BAD + 1})
    answer = {}
    for form in forms.FORMS:
        folder = Path(tempfile.mkdtemp())
        options = {"incidents": out / form}
        answer[form] = {
            "bad": told(form, Asked(folder, bad, options=options)),
            "clean": told(form, Asked(folder, clean)),
        }
    answer["streams"] = streams()
    answer["saved"] = saved_by_the_first_rank(out)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, answer)
    if dist.get_rank() == 0:
        (out / "answer.json").write_text(json.dumps(everyone))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
