"""Tells what happened to one of the five systems: it breaks, is explained, repaired, and trains.

    make example NAME=radio_diffusion
    python -m examples.story radio_diffusion --folder /tmp/radio

The system is copied to a folder of its own first, so that nothing here changes. What it is, how it
breaks and what is expected of nanguard stands in its ``story.yaml``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nanguard.check.log.series import LogPoint

HOME = Path(__file__).resolve().parent
NAMES = sorted(path.parent.name for path in HOME.glob("*/story.yaml"))
# A repaired run has to end this far below its start.
ENOUGH = 0.7


@dataclass(frozen=True)
class Ended:
    """A command that has come to its end."""

    code: int
    output: str


@dataclass(frozen=True)
class Cause:
    """One way in which a system can break."""

    name: str
    what: str
    set: Mapping[str, Any] = field(default_factory=dict)
    expect: Mapping[str, Any] | None = None
    check: Sequence[Mapping[str, str]] = ()
    repair: Mapping[str, Any] | None = None
    steps: int | None = None
    says: str = ""
    config: str = ""


@dataclass(frozen=True)
class Story:
    """A system, and what is told about it."""

    folder: Path
    told: Mapping[str, Any]

    @classmethod
    def of(cls, name: str, folder: Path) -> Story:
        """Copies a system to a folder and returns its story there."""
        if name not in NAMES:
            raise SystemExit(f"there is no system {name!r}; there are: {', '.join(NAMES)}")
        unwanted = shutil.ignore_patterns("__pycache__", "runs", "*.pyc", ".nanguard")
        shutil.copytree(HOME / name, folder, dirs_exist_ok=True, ignore=unwanted)
        told = yaml.safe_load((folder / "story.yaml").read_text(encoding="utf-8"))
        return cls(folder, told)

    @property
    def causes(self) -> list[Cause]:
        """Every cause of its report."""
        return [Cause(**one) for one in self.told["causes"]]

    def command(
        self,
        out: str,
        sets: Mapping[str, Any] | None = None,
        *,
        config: str = "",
        steps: int = 0,
        train: Sequence[str] = (),
    ) -> list[str]:
        """Returns the command that trains."""
        words = [_program(word) for word in train or self.told["train"]]
        words += ["--config", config or self.told["config"], "--out", out]
        words += ["--steps", str(steps)] if steps else []
        for key, value in (sets or {}).items():
            words += ["--set", f"{key}={_word(value)}"]
        return words

    def run(self, words: Sequence[str], *, show: bool = False, seconds: float = 900.0) -> Ended:
        """Runs a command in the system's folder."""
        # The systems are small, and run beside each other: threads would only wait for threads.
        threads = {"OMP_NUM_THREADS": "1"}
        environment = {**threads, **os.environ, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
        process = subprocess.Popen(
            list(words),
            cwd=self.folder,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            errors="replace",
        )
        lines = []
        with process:
            try:
                for line in process.stdout or ():
                    lines.append(line)
                    if show:
                        print("  " + line, end="")
                code = process.wait(seconds)
            except BaseException:
                process.kill()
                raise
        return Ended(code, "".join(lines))

    def guarded(self, words: Sequence[str], incidents: str, *options: str) -> Ended:
        """Runs a command under ``nanguard run``."""
        return self.run([*nanguard("run", "--incidents", incidents, *options), "--", *words])

    def repaired(self) -> str:
        """Writes the stable configuration as the story says; returns its name."""
        how, fixed = self.told["repair"], self.told["fixed"]
        (self.folder / fixed).unlink(missing_ok=True)
        if how == "check-fix":
            self.run(nanguard("check", self.told["config"], "--fix", "--no-cache"))
        else:
            self.run(nanguard("preset", *map(str, how["preset"]), "-o", fixed))
        return str(fixed)

    def incident(self, incidents: str) -> dict[str, Any] | None:
        """Returns the first incident of a run."""
        paths = self.folder.glob(f"{incidents}/*/incident.json")
        found = [
            {**json.loads(path.read_text(encoding="utf-8")), "folder": str(path.parent)}
            for path in paths
        ]
        return min(found, key=lambda one: (one["step"], one["rank"]), default=None)

    def findings(self, path: str) -> list[dict[str, Any]]:
        """Returns what ``nanguard check`` says about a file of the system."""
        words = ["--format", "json", "--fail-on", "none", "--no-cache"]
        ended = self.run(nanguard("check", path, *words))
        try:
            report = json.loads(ended.output[ended.output.index("{") :])
        except ValueError:
            return []
        return list(report["findings"])

    def missing(self, expect: Mapping[str, Any], incident: Mapping[str, Any] | None) -> list[str]:
        """Returns in which points an incident is not what was expected."""
        if incident is None:
            return ["there is no incident"]
        origin, cause = incident.get("origin") or {}, incident.get("cause") or {}
        said = {
            "cause": cause.get("code"),
            "file": Path(str(origin.get("file"))).name,
            "line": origin.get("line"),
            "step": incident["step"],
            **{key: origin.get(key) for key in ("op", "phase", "module")},
        }
        wanted: dict[str, Any] = dict(expect)
        if "line" in wanted:
            wanted["line"] = line_of(self.folder / wanted["file"], str(wanted["line"]))
        return [
            f"{key} is {said.get(key)!r}, expected {value!r}"
            for key, value in wanted.items()
            if not _fits(value, said.get(key))
        ]

    def curve(self, out: str) -> tuple[list[float], list[float]]:
        """Returns steps and losses of a run, as nanguard reads them from its log."""
        from nanguard.check.log.log_reader import open_sources
        from nanguard.check.scan import Scan

        for log in open_sources([self.folder / out / self.told["log"]], Scan()):
            for series in log.series:
                if self.told["curve"] in (series.name, series.metric.name):
                    points = [series[index] for index in range(len(series))]
                    return [_place(point) for point in points], [p.value for p in points]
        return [], []


def _place(point: LogPoint) -> float:
    """Returns the step of a point, or its epoch, or how many came before it."""
    if point.step is not None:
        return float(point.step)
    return float(point.index if point.epoch is None else point.epoch)


def line_of(path: Path, text: str) -> int:
    """Returns the number of the one line of a file that holds a text."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = [number for number, line in enumerate(lines, 1) if text in line]
    if len(found) != 1:
        raise ValueError(f"{text!r} is on {len(found)} lines of {path.name}, not on one")
    return found[0]


def fall(losses: Sequence[float]) -> float:
    """Returns how a curve ends, as a part of how it began; NaN where it did not stay finite."""
    if len(losses) < 2 or not all(map(math.isfinite, losses)):
        return math.nan
    few = max(1, len(losses) // 10)
    return (sum(losses[-few:]) / few) / (sum(losses[:few]) / few)


def nanguard(*words: str) -> list[str]:
    """Returns a command of nanguard's."""
    return [sys.executable, "-m", "nanguard", *words]


def tell(story: Story) -> bool:
    """Tells the story from its beginning to its end; returns whether it was as expected."""
    config = story.told["config"]
    print(f"{story.told['title']}\nEverything happens in {story.folder}\n")
    print("1. The run as its team had it")
    plain = story.run(story.command("plain"))
    _show(plain.output)
    steps, losses = story.curve("plain")
    bad = [step for step, loss in zip(steps, losses, strict=True) if not math.isfinite(loss)]
    print(f"   -> {f'not finite from {bad[0]:g} on' if bad else 'finite to the end'}\n")
    print(f"2. The same command under the guard: nanguard run -- {' '.join(story.told['train'])}")
    story.guarded(story.command("guarded"), "incidents")
    incident = story.incident("incidents")
    if incident is not None:
        story.run(nanguard("explain", incident["folder"]), show=True)
    wrong = story.missing(story.told["main"]["expect"], incident)
    print("   -> as expected\n" if not wrong else f"   -> not as expected: {'; '.join(wrong)}\n")
    print(f"3. The repair: nanguard check {config} --fix")
    story.run(nanguard("check", config, "--diff", "--no-cache", "--fail-on", "none"), show=True)
    fixed = story.repaired()
    print(f"   -> {fixed}\n")
    print("4. The repaired run")
    healthy = story.run(story.command("repaired", story.told.get("repair_set"), config=fixed))
    _show(healthy.output)
    share = fall(story.curve("repaired")[1])
    print(f"   -> the loss ends at {share:.0%} of its start\n")
    draw(story, bad)
    print(f"the two curves: {story.folder / 'curves.png'}")
    return bool(bad) and not wrong and healthy.code == 0 and share <= ENOUGH


def draw(story: Story, bad: Sequence[float]) -> None:
    """Draws both curves, with a mark where the first one ends."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    for out, label, colour in (
        ("plain", "as its team had it", "#c0392b"),
        ("repaired", "repaired", "#1f6f54"),
    ):
        steps, losses = story.curve(out)
        # A line of one point cannot be seen.
        few = "o" if sum(map(math.isfinite, losses)) < 3 else None
        axes.plot(steps, losses, color=colour, label=label, linewidth=1.4, marker=few)
    if bad:
        axes.axvspan(bad[0], max(bad[-1], bad[0] + 1), color="#c0392b", alpha=0.12, lw=0)
        axes.axvline(bad[0], color="#c0392b", linewidth=0.8, linestyle=":")
        axes.annotate(
            f"not finite from {bad[0]:g} on",
            (bad[0], 0.94),
            (4, 0),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            color="#c0392b",
            fontsize=9,
        )
    axes.set_yscale("log")
    axes.set_xlabel(story.told.get("axis", "step"))
    axes.set_ylabel(story.told["curve"])
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(story.folder / "curves.png", dpi=120)
    pyplot.close(figure)


def _show(output: str, first: int = 3, last: int = 6) -> None:
    lines = output.splitlines()
    shown = lines if len(lines) <= first + last else [*lines[:first], "...", *lines[-last:]]
    print("\n".join(f"   {line}" for line in shown))


def _program(word: str) -> str:
    if word == "python":
        return sys.executable
    beside = Path(sys.executable).parent / word
    return str(beside) if "/" not in word and beside.exists() else word


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _fits(wanted: Any, said: Any) -> bool:
    if isinstance(wanted, list) and len(wanted) == 2 and isinstance(said, int):
        return bool(wanted[0] <= said <= wanted[1])
    return bool(wanted == said)


def main() -> None:
    """Tells one story."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="?", help=", ".join(NAMES))
    parser.add_argument("--folder", type=Path, help="where to; .nanguard/examples/NAME by default")
    args = parser.parse_args()
    if args.name not in NAMES:
        parser.error(f"name one of the systems: {', '.join(NAMES)}")
    folder = args.folder or Path(".nanguard/examples") / args.name
    for old in ("plain", "guarded", "incidents", "repaired"):
        shutil.rmtree(folder / old, ignore_errors=True)
    told = tell(Story.of(args.name, folder.resolve()))
    raise SystemExit(0 if told else 1)


if __name__ == "__main__":
    main()
