"""Fuzzes ``nanguard check``, ``explain`` and ``report``; see ``CONTRIBUTING.md``.

python -m benchmarks.fuzz --seconds 600 --processes 2      # what make fuzz does
python -m benchmarks.fuzz --count 100000 --seed 3 torch safetensors
python -m benchmarks.fuzz --again torch 4711               # one input by its number
python -m benchmarks.fuzz --sum a.json b.json --output c.json  # several campaigns as one
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.fuzz.campaign import (
    WRONG,
    Campaign,
    Failure,
    Tally,
    Trial,
    as_a_user,
    minimised,
    verdict_in,
)
from benchmarks.fuzz.inputs import KINDS, input_of

# Failures that are made smaller; a defect that is met a thousand times is one.
_MOST_MINIMISED = 20


def main() -> int:
    """Runs a campaign; returns 1 if anything went wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--seconds", type=float, help="how long; 600 without --count")
    parser.add_argument("--count", type=int, help="how many inputs, of all kinds together")
    parser.add_argument("--seed", type=int, default=0, help="what inputs come from")
    parser.add_argument("--begin", type=int, default=0, help="the number of the first input")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"), help="a folder")
    parser.add_argument("--output", type=Path, help="a file for the figures, as JSON")
    parser.add_argument("--again", nargs=2, metavar=("KIND", "NUMBER"), help="check one input")
    parser.add_argument("--corpus", type=Path, help="a folder of saved failures to check again")
    parser.add_argument("--sum", nargs="+", type=Path, help="figures to add up", metavar="FILE")
    asked = parser.parse_args()
    if asked.sum:
        return _sum(asked.sum, asked.output)
    if asked.corpus:
        return _corpus(asked.corpus)
    if asked.again:
        return _again(asked.again[0], asked.seed, int(asked.again[1]))
    unknown = [kind for kind in asked.kinds if kind not in KINDS]
    if unknown:
        parser.error(f"there is no kind {unknown[0]!r}; there are: {', '.join(KINDS)}")
    seconds = 600.0 if asked.seconds is None and asked.count is None else asked.seconds
    campaign = Campaign(
        asked.kinds or list(KINDS),
        seed=asked.seed,
        begin=asked.begin,
        processes=asked.processes,
        tell=lambda tally: _write(asked.output, tally, began),
    )
    began = time.monotonic()
    tally = campaign.run(count=asked.count, seconds=seconds)
    _save(tally.failures, asked.failures)
    _write(asked.output, tally, began)
    print(json.dumps(_figures(tally, began), indent=1))
    return 1 if tally.failures else 0


def _again(kind: str, seed: int, number: int) -> int:
    """Checks one input once more, here and as a user; leaves it in this folder."""
    data = input_of(kind, seed, number)
    Path(KINDS[kind].file).write_bytes(data)
    says, (what, why) = verdict_in(kind, data), as_a_user(kind, data)
    print(f"{KINDS[kind].file}: {len(data)} bytes, {says}; as a user: {what or 'fine'} {why}")
    return int(says in ("traceback", "clean-but-refused") or bool(what))


def _corpus(folder: Path) -> int:
    """Checks what failed once; prints what fails now."""
    by_length = sorted(KINDS, key=len, reverse=True)
    trials: dict[str, Trial] = {}
    wrong, files = 0, sorted(folder.iterdir())
    for path in files:
        kind = next(kind for kind in by_length if path.name.startswith(f"{kind}-"))
        verdict = trials.setdefault(kind, Trial(kind)).verdict(path.read_bytes())
        if verdict in WRONG:
            wrong += 1
            print(f"{path.name}: {verdict}")
    for trial in trials.values():
        trial.end()
    print(f"{len(files)} files, {wrong} of them fail")
    return int(wrong > 0)


def _sum(files: list[Path], output: Path | None) -> int:
    """Adds up the figures of several campaigns; prints them, and writes them if asked to."""
    each = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    told: dict[str, Any] = {"commands": [one["command"] for one in each], "kinds": {}}
    for name, value in each[0].items():
        if name == "kinds":
            for kind in dict.fromkeys(kind for one in each for kind in one[name]):
                told["kinds"][kind] = _added([one["kinds"].get(kind, {}) for one in each])
        elif name == "failures":
            told[name] = _added([one[name] for one in each])
        elif name == "failed":
            told[name] = [failed for one in each for failed in one[name]]
        elif name == "largest_process_mb":
            told[name] = max(one[name] for one in each)
        elif name in ("python", "cores"):
            told[name] = value
        elif isinstance(value, int):
            told[name] = sum(one[name] for one in each)
    text = json.dumps(told, indent=1) + "\n"
    print(text, end="")
    if output is not None:
        output.write_text(text, encoding="utf-8")
    return int(any(told["failures"].values()))


def _added(each: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns sums by name, and the largest of what is the slowest."""
    names = dict.fromkeys(name for one in each for name in one)
    found = {name: [one[name] for one in each if name in one] for name in names}
    return {name: max(v) if name == "slowest_s" else sum(v) for name, v in found.items()}


def _save(failures: list[Failure], folder: Path) -> None:
    """Writes what failed, made small; the same input under the same name."""
    for failure in failures[:_MOST_MINIMISED]:
        small = minimised(failure)
        folder.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(small.data).hexdigest()[:12]
        path = folder / f"{small.kind}-{small.what}-{digest}"
        path.write_bytes(small.data)
        print(f"{path}: input {small.number}: {small.why}", file=sys.stderr)


def _figures(tally: Tally, began: float) -> dict[str, Any]:
    wrong = dict.fromkeys(WRONG, 0)
    for failure in tally.failures:
        wrong[failure.what] += 1
    return {
        "command": " ".join(["python", "-m", "benchmarks.fuzz", *sys.argv[1:]]),
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
        "seconds": round(time.monotonic() - began),
        "cpu_seconds": _cpu_seconds(),
        "inputs": tally.inputs.total(),
        "distinct": len(set(tally.digests)),
        "read_by_a_worker_with_limits": tally.by_worker,
        "checked_by_the_command": tally.by_command,
        "largest_process_mb": tally.memory >> 20,
        "compared_with_their_own_reader": tally.compared.total(),
        "failures": wrong,
        "kinds": {
            kind: {
                "inputs": tally.inputs[kind],
                "slowest_s": round(tally.slowest.get(kind, 0.0), 2),
                **dict(sorted(verdicts.items())),
            }
            for kind, verdicts in tally.verdicts.items()
        },
        "failed": [
            {"kind": one.kind, "number": one.number, "what": one.what, "why": one.why[:200]}
            for one in tally.failures[:100]
        ],
    }


def _cpu_seconds() -> int:
    """Returns the processor time of this process and of those that have ended."""
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return round(sum(used.ru_utime + used.ru_stime for used in both))


def _write(path: Path | None, tally: Tally, began: float) -> None:
    if path is not None:
        path.write_text(json.dumps(_figures(tally, began), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
