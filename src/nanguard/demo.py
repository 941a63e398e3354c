"""The whole story on embedded runs: faults strike, none leaves a trace, and one is explained."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

from nanguard import demo_train
from nanguard import incident as incidents
from nanguard.findings import name_of
from nanguard.guard import Guard
from nanguard.run.command import run_command
from nanguard.testing.faults import inject
from nanguard.view.report.html import page
from nanguard.view.report.incident_page import incident_page
from nanguard.view.report.verdict import judge
from nanguard.view.runs import find_runs, open_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rich.console import RenderableType

    from nanguard.guard.journal import Event, Summary

TEXT = """\
The lighthouse keeper wrote one number every hour: the height of the water at the stair. On calm
days the column was dull. Eleven, eleven, twelve, eleven. In the autumn the numbers began to climb,
and the keeper, who did not like large numbers, stopped believing the staff and wrote what the water
should have been. The book looked healthy all through the winter. In spring the harbour master came,
opened the book, and asked why the stair was gone. There had been nothing to see, said the keeper.
The harbour master bought a second staff and a bell. When the water passed the red mark the bell
rang, and whoever was nearest closed the gate, and wrote down the hour, the height, and the name of
the wind. Nobody ever erased a line. In the years after, the water passed the mark many times. Each
time the gate was closed before a drop came over the wall, each time the reason was found and noted
beside the number, and each time the gate was opened again and the boats went out as if there had
been no storm at all. The old book is kept in a glass case by the door. It is open at the winter, so
that everyone who comes in can read how calm it was. Eleven, eleven, twelve, eleven.
"""
LENGTH, BATCH, WIDTH = 48, 12, 48

# Text, target and weight of each sequence.
Batch = tuple[Tensor, Tensor, Tensor]


class DemoWriter(nn.Module):
    """A small transformer that continues text, letter by letter."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, letters)

    def forward(self, text: Tensor) -> Tensor:
        """Returns what the next letter may be, at every place."""
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        here = self.letters(text) + self.places(torch.arange(text.shape[1]))
        out: Tensor = self.head(self.blocks(here, mask=mask, is_causal=True))
        return out


@dataclass(frozen=True)
class Faults:
    """What strikes, and when."""

    batch: int
    gradient: int
    spike: int

    @property
    def steps(self) -> set[int]:
        """All steps that something strikes."""
        return {self.batch, self.gradient, self.spike}


class Story:
    """One training run, which can be shown several ways."""

    def __init__(self, steps: int) -> None:
        self.faults = Faults(batch=steps // 3, gradient=steps // 2, spike=3 * steps // 4)
        alphabet = sorted(set(TEXT))
        tokens = torch.tensor([alphabet.index(letter) for letter in TEXT])
        generator = torch.Generator().manual_seed(7)
        starts = torch.randint(0, len(tokens) - LENGTH, (steps, BATCH), generator=generator)
        windows = starts[..., None] + torch.arange(LENGTH + 1)
        self._pieces = tokens[windows]
        self._letters = len(alphabet)

    def batches(self, *, faults: bool) -> Iterator[Batch]:
        """Yields the data: with its faults, or as if the faulty batches had never been there."""
        for step, piece in enumerate(self._pieces):
            if not faults and step in self.faults.steps:
                continue
            weight = torch.ones(BATCH)
            if step == self.faults.batch:
                weight[5] = float("nan")
            elif step == self.faults.spike:
                weight *= 1e4
            yield piece[:, :-1], piece[:, 1:], weight

    def start(self) -> tuple[DemoWriter, torch.optim.Optimizer, Any]:
        """Returns model, optimizer and schedule, the same every time."""
        torch.manual_seed(0)
        model = DemoWriter(self._letters)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 3e-3, total_steps=len(self._pieces) + 1
        )
        return model, optimizer, schedule

    def loss(self, model: DemoWriter, batch: Batch) -> Tensor:
        """Returns the weighted loss of a batch."""
        text, target, weight = batch
        letters = F.cross_entropy(model(text).transpose(1, 2), target, reduction="none")
        return (letters.mean(1) * weight).sum() / BATCH

    def bare(self, data: Iterable[Batch], after: Callable[[float], None]) -> DemoWriter:
        """Trains without a guard."""
        model, optimizer, schedule = self.start()
        for batch in data:
            loss = self.loss(model, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            after(loss.item())
        return model

    def guarded(
        self, run_dir: Path, on_event: Callable[[Event], None], after: Callable[[float], None]
    ) -> tuple[DemoWriter, Summary]:
        """Trains under the guard, through the faults."""
        model, optimizer, schedule = self.start()
        with (
            Guard(
                model, optimizer, scheduler=schedule, run_dir=run_dir, on_event=on_event
            ) as guard,
            inject(
                guard, "nan", into="gradient", parameter="head.weight", step=self.faults.gradient
            ),
        ):
            for batch in guard.watch(self.batches(faults=True)):
                loss = self.loss(model, batch)
                guard.backward(loss)
                guard.step(max_norm=1.0)
                after(loss.item())
            guard.end_epoch()
        return model, guard.summary()


class Stage:
    """Shows a run on the terminal: a live bar where there is one, plain lines elsewhere."""

    def __init__(self, *, quiet: bool) -> None:
        self._console = Console(highlight=False)
        self._quiet = quiet

    def say(self, what: RenderableType = "") -> None:
        """Prints something, unless only the verdicts are wanted; a line stays a line."""
        if not self._quiet:
            # Commands and paths are copied from here; pages break their prose by themselves.
            self._console.print(what, soft_wrap=isinstance(what, str), crop=False)

    def verdict(self, text: str) -> None:
        """Prints what the story comes to, as one line."""
        self._console.print(text, soft_wrap=True)

    def event(self, event: Event) -> None:
        """Prints what happened and what the guard did."""
        self.say(f"  [bold red]![/] {escape(str(event))}")

    def play(self, title: str, total: int, run: Callable[[Callable[[float], None]], Any]) -> Any:
        """Plays a run and shows how far it is."""
        if self._quiet or not self._console.is_terminal:
            self.say(f"{title} ({total} steps)")
            return run(lambda _loss: None)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task(title, total=total, loss="")
            return run(lambda loss: progress.update(task, advance=1, loss=name_of(loss)))


def run_demo(*, run_dir: Path | None, steps: int, quiet: bool) -> bool:
    """Tells the story; returns whether the weights are identical.

    Args:
        run_dir: Where the run record goes; a new folder below ``.nanguard`` by default.
        steps: How many steps to train.
        quiet: Whether to print the verdict only.
    """
    folder = run_dir or Path(".nanguard/demo") / time.strftime("%Y-%m-%dT%H-%M-%S")
    story, stage = Story(steps), Stage(quiet=quiet)
    began = time.monotonic()
    stage.say(f"This takes about {max(20, steps // 12)} seconds on two cores.\n")
    stage.say("[bold]A small transformer learns a page of text. Three faults will strike it:[/]")
    stage.say(f"  step {story.faults.batch}: a batch with a NaN in it")
    stage.say(f"  step {story.faults.gradient}: a gradient that turns NaN, under a finite loss")
    stage.say(f"  step {story.faults.spike}: a loss 10 000 times too large\n")
    with _one_thread():
        with _silent_log():
            guarded, summary = stage.play(
                "guarded run", steps, lambda after: story.guarded(folder, stage.event, after)
            )
        broken = stage.play(
            "the same run without the guard",
            steps,
            lambda after: story.bare(story.batches(faults=True), after),
        )
        clean = stage.play(
            "the run that never saw the faults",
            steps - len(story.faults.steps),
            lambda after: story.bare(story.batches(faults=False), after),
        )
    stage.say()
    stage.say(_table(guarded, broken, clean))
    stage.say(f"\n{str(summary).splitlines()[0]}")
    stage.say(f"run record: {escape(str(folder))}")
    identical = _fingerprint(guarded) == _fingerprint(clean)
    stage.verdict(_verdict(guarded, identical=identical))
    explained = _explain_a_script(folder / "script", stage)
    path = _write_report(folder)
    stage.say(f"It took {time.monotonic() - began:.0f} seconds. The whole story on one page:")
    stage.verdict(f"report: {escape(str(path))}")
    return identical and explained


def _write_report(folder: Path) -> Path:
    """Writes one page about the guarded run and the script's."""
    runs = [open_run(one) for one in find_runs([str(folder)])]
    for run in runs:
        judge(run)
    path = folder / "report.html"
    path.write_text(page(runs, "nanguard demo"), encoding="utf-8", errors="backslashreplace")
    return path


def _explain_a_script(folder: Path, stage: Stage) -> bool:
    """Runs a script that knows nothing of nanguard, and shows why one of its steps went bad."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "train.py"
    shutil.copy(demo_train.__file__, script)
    stage.say("\n[bold]And why? A script that knows nothing of nanguard, with a fault in it:[/]")
    stage.say(f"  nanguard run -- python {script.name}\n")
    incidents_folder = folder / "incidents"
    code = run_command([sys.executable, str(script)], incidents=incidents_folder, quiet=True)
    found = sorted(incidents_folder.glob("*/incident.json"))
    if code or not found:
        stage.verdict("[bold red]not explained[/]: the script's bad step left no incident")
        return False
    incident = incidents.read(found[0])
    stage.say(incident_page(incident, folder=str(found[0].parent)))
    fixed = any(fix["verified"] for fix in incident["fixes"])
    stage.verdict(
        f"[bold green]explained[/]: {incident['cause']['code']} at {script.name}:"
        f"{incident['origin']['line']}, with a fix that was tried"
        if fixed
        else "[bold red]not explained[/]: no fix could be verified"
    )
    return fixed


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Computes in one thread: a model as small as this one waits for several twice as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def _silent_log() -> Iterator[None]:
    """Keeps the log quiet where the stage shows the events itself."""
    log = logging.getLogger("nanguard")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _table(guarded: DemoWriter, broken: DemoWriter, clean: DemoWriter) -> Table:
    table = Table("run", "non-finite weights", "fingerprint of all weights")
    for name, model in (
        ("guarded", guarded),
        ("without the guard", broken),
        ("never saw the faults", clean),
    ):
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        bad = int((~torch.isfinite(weights)).sum())
        table.add_row(name, f"{bad} of {len(weights)}", _fingerprint(model)[:32])
    return table


def _verdict(model: DemoWriter, *, identical: bool) -> str:
    if not identical:
        return "[bold red]different[/]: the guarded run is not the run that never saw the faults"
    tensors = model.state_dict().values()
    return (
        f"[bold green]identical[/]: all {sum(t.numel() for t in tensors)} numbers in "
        f"{len(tensors)} tensors of the guarded run equal, bit by bit, those of the run that "
        "never saw the faults"
    )


def _fingerprint(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
