"""How often ``nanguard run`` is right about real failures.

Each case is a small training script with a label: where its first bad value comes from, at which
step, and why. It runs unmodified under ``nanguard run``, and its first incident is compared with
the label. Healthy scripts that look suspicious must stay silent. A case of several files is a
folder, whose ``train.py`` is run. Beside the sums stands a table of how sure nanguard was, and how
often it was right then.

    python -m benchmarks.accuracy                      # both sets
    python -m benchmarks.accuracy tests/cases/open wgan_gp char_rnn
    python -m benchmarks.accuracy --device cuda --jobs 12

On CUDA the scripts are made to compute there (``tests/where/cudashim.py``). Not every fault comes
up there, and some scripts fail in another line because their random weights are others; both are
established without nanguard (``tests/where/truth.py``) and counted apart.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[1] / "tests"
_CASES = _TESTS / "cases"
COLUMNS = ("detected", "step", "phase", "op", "line", "module", "cause", "sample", "fix")


@dataclass(frozen=True)
class Case:
    """A script with its label."""

    folder: Path
    label: dict[str, Any]

    @property
    def name(self) -> str:
        """What it is called."""
        return str(self.label["id"])

    @property
    def healthy(self) -> bool:
        """Whether it must stay silent."""
        return bool(self.label["healthy"])


def cases_in(folder: Path) -> list[Case]:
    """Returns the cases of a set."""
    labels = json.loads((folder / "cases.json").read_text())["cases"]
    return [Case(folder, label) for label in labels]


def first_incident(
    case: Case, seconds: float = 240.0, device: str = "cpu"
) -> dict[str, Any] | None:
    """Runs a case under ``nanguard run`` and returns its first incident, if there is one."""
    command = [sys.executable, "-m", "nanguard", "run", "--incidents", "found", "--"]
    with tempfile.TemporaryDirectory() as scratch:
        _run(case, device, scratch, [*command, sys.executable], seconds)
        paths = sorted(Path(scratch).glob("found/*/incident.json"))
        found = [json.loads(path.read_text()) for path in paths]
    return min(found, key=lambda incident: incident["step"], default=None)


def lines_on_cuda(case: Case) -> list[str] | None:
    """Returns the lines that turn good values into bad ones on CUDA, seen without nanguard.

    None for a script that cannot be run there: its tensors come to lie on two devices.
    """
    with tempfile.TemporaryDirectory() as scratch:
        look = str(_TESTS / "where" / "truth.py")
        done = _run(case, "cuda", scratch, [sys.executable, look], 120.0)
    told = [line for line in done.stdout.splitlines() if line.startswith("FIRST ")]
    if not told and "device" in done.stderr.rstrip().rpartition("\n")[2]:
        return None
    return [line.rpartition(" ")[2] for line in told]


def _run(
    case: Case, device: str, scratch: str, command: list[str], seconds: float
) -> subprocess.CompletedProcess[str]:
    script = case.folder / case.label["file"]
    if script.parent != case.folder:
        shutil.copytree(script.parent, scratch, dirs_exist_ok=True)
    text = script.read_text()
    if device == "cuda":
        shutil.copy(_TESTS / "where" / "cudashim.py", scratch)
        # The line numbers, which are labels, stay.
        text = text.replace("import torch\n", "import torch; import cudashim\n", 1)
    Path(scratch, "train.py").write_text(text)
    return subprocess.run(  # noqa: S603 - our own scripts
        [*command, "train.py"],
        cwd=scratch,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def judge(case: Case, incident: dict[str, Any] | None) -> dict[str, bool | None]:
    """Returns, column by column, whether an incident says what the label says."""
    label = case.label
    if incident is None:
        return dict.fromkeys(COLUMNS, False)
    origin, cause = incident.get("origin") or {}, incident.get("cause") or {}
    shown = label["first_bad_loss_step"]
    row = (label.get("sample") or {}).get("batch_position")
    return {
        "detected": incident["step"] <= (label["first_bad_step"] + 1 if shown is None else shown),
        "step": incident["step"] == label["first_bad_step"],
        "phase": origin.get("phase") in {label["phase"], *(label.get("accept_phases") or [])},
        "op": _bare(origin.get("op"))
        in {_bare(op) for op in [label["origin_op"], *(label.get("accept_ops") or [])]},
        "line": _is_line(label, origin),
        "module": origin.get("module") == label["origin_module"],
        "cause": cause.get("code") in {label["category"], *(label.get("accept_categories") or [])},
        "sample": None if row is None else row in incident.get("samples", []),
        "fix": any(fix["verified"] for fix in incident.get("fixes", [])),
    }


def _is_line(label: dict[str, Any], origin: dict[str, Any]) -> bool:
    known = {label["origin_line"], label.get("data_line")} - {None}
    file = label.get("origin_file")
    same = file is None or Path(str(origin.get("file"))).name == file
    return same and origin.get("line") in known


# Where the bands of stated confidence begin; from the last on, a report says "proven".
BANDS = (0.0, 0.5, 0.7, 0.9)


def calibration(judged: list[tuple[float, bool]]) -> list[dict[str, Any]]:
    """Returns, for each band of stated confidence, how often the cause was right.

    Args:
        judged: The confidence of each incident, and whether its cause is the labelled one.
    """
    rows = []
    for low, high in zip(BANDS, (*BANDS[1:], math.inf), strict=True):
        band = [(stated, right) for stated, right in judged if low <= stated < high]
        if band:
            rows.append(
                {
                    "stated": f"{low:.1f} to {min(high, 1.0):.1f}",
                    "mean": round(sum(stated for stated, _ in band) / len(band), 2),
                    "right": f"{sum(right for _, right in band)}/{len(band)}",
                }
            )
    return rows


def _said(incident: dict[str, Any]) -> str:
    origin, cause = incident.get("origin") or {}, incident.get("cause") or {}
    where = f"step {incident['step']}, {origin.get('phase')} {origin.get('op')}"
    where += f", line {origin.get('line')} in {origin.get('module')!r}"
    return f"{where}, {cause.get('code')} ({cause.get('confidence')})"


def _bare(op: Any) -> str:
    return str(op).removeprefix("aten.").rstrip("_")


def score(folder: Path, names: list[str], device: str, jobs: int) -> dict[str, Any]:
    """Runs the cases of a set, a few at a time, and prints a line for each as soon as it can."""
    cases = [case for case in cases_in(folder) if not names or case.name in names]
    judged = []
    stated: list[tuple[float, bool]] = []
    alarms = absent = unfit = elsewhere = 0
    pool = ThreadPoolExecutor(jobs)
    found = pool.map(lambda case: first_incident(case, device=device), cases)
    for case, incident in zip(cases, found, strict=True):
        if case.healthy:
            alarms += incident is not None
            print(f"{case.name:20s} {'FALSE ALARM' if incident else 'silent'}")
            continue
        row = judge(case, incident)
        wrong = [column for column, right in row.items() if right is False]
        if device == "cuda" and "line" in wrong:
            lines = lines_on_cuda(case)
            if incident is None and not lines:
                absent += lines is not None
                unfit += lines is None
                print(f"{case.name:20s} does not {'run' if lines is None else 'come up'} there")
                continue
            if incident and lines and lines[0] != str(case.label["origin_line"]):
                elsewhere += 1
                print(f"{case.name:20s} fails in line {lines[0]} there; said: {_said(incident)}")
                continue
        judged.append(row)
        if incident:
            confidence = (incident.get("cause") or {}).get("confidence", 0.0)
            stated.append((confidence, bool(row["cause"])))
        print(f"{case.name:20s} {'wrong: ' + ', '.join(wrong) if wrong else 'right'}")
        if wrong and incident:
            print(f"{'':20s} said: {_said(incident)}")
    pool.shutdown()
    sums: dict[str, Any] = {}
    for column in COLUMNS:
        known = [row[column] for row in judged if row[column] is not None]
        sums[column] = f"{sum(map(bool, known))}/{len(known)}"
    if device == "cuda":
        sums["does not run"], sums["does not come up"] = unfit, absent
        sums["fails elsewhere"] = elsewhere
    sums["calibration"] = calibration(stated)
    sums["false alarms"] = f"{alarms}/{sum(case.healthy for case in cases)}"
    return sums


def main() -> None:
    """Scores one set, or both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    folders = [args.folder] if args.folder else [_CASES / "open", _CASES / "own"]
    result = {f.name: score(f, args.names, args.device, args.jobs) for f in folders}
    print(json.dumps(result, indent=1))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
