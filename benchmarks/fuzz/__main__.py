"""Fuzzes ``nanguard check``, ``explain`` and ``report``; see ``CONTRIBUTING.md``.

python -m benchmarks.fuzz --seconds 600 --processes 2      # what make fuzz does
python -m benchmarks.fuzz --count 100000 --seed 3 torch safetensors
python -m benchmarks.fuzz --again torch 4711               # one input by its number
python -m benchmarks.fuzz --processes 16 --count 1000000 --seconds 520 --output f.json
python -m benchmarks.fuzz --sum a.json b.json --output c.json  # several campaigns as one

A campaign that is stopped by time says how far it came. Campaigns are only added up if their code
was the same and no input is counted twice.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections import Counter
from importlib import metadata
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
)
from benchmarks.fuzz.inputs import KINDS, ROOT, TESTS, input_of

# Failures that are made smaller; a defect that is met a thousand times is one.
_MOST_MINIMISED = 20
# What the readers come from: they refuse other files in other versions.
_LIBRARIES = ("torch", "numpy", "polars", "safetensors", "pyyaml", "tensorboard", "wandb")
# Figures whose sums mean something.
_ADDED = (
    "seconds",
    "cpu_seconds",
    "inputs",
    "distinct",
    "read_by_a_worker_with_limits",
    "checked_by_the_command",
    "compared_with_their_own_reader",
)


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
        tell=lambda tally: _write(asked.output, {**known, **_figures(tally, began)}),
    )
    known: dict[str, Any] = {
        **_machine(),
        "command": " ".join(["python", "-m", "benchmarks.fuzz", *sys.argv[1:]]),
        "seed": asked.seed,
        "begin": asked.begin,
        "processes": asked.processes,
    }
    began = time.monotonic()
    tally = campaign.run(count=asked.count, seconds=seconds)
    # Before failures are made small, which may take longer than a machine is lent for.
    _write(asked.output, {**known, **_figures(tally, began)})
    print(json.dumps({**known, **_figures(tally, began)}, indent=1), flush=True)
    _save(tally.failures, asked.failures)
    return 1 if tally.failures else 0


def _again(kind: str, seed: int, number: int) -> int:
    """Checks one input once more, here and as a user; leaves it in this folder."""
    data = input_of(kind, seed, number)
    Path(KINDS[kind].file).write_bytes(data)
    trial = Trial(kind)
    says, (what, why) = trial.verdict(data), as_a_user(kind, data)
    trial.end()
    print(f"{KINDS[kind].file}: {len(data)} bytes, {says}; as a user: {what or 'fine'} {why}")
    return int(says in WRONG or bool(what))


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
    wrong = _why_not_one(each)
    if wrong:
        print(f"these figures do not add up: {wrong}", file=sys.stderr)
        return 2
    same = {name: value for name, value in each[0].items() if all(o[name] == value for o in each)}
    about = ("command", "seed", "begin", "seconds", "inputs", "stopped", "machine", "libraries")
    known = {name: same[name] for name in ("code", "commit", "python", "libraries") if name in same}
    campaigns = [{name: one[name] for name in about} for one in each]
    kinds = dict.fromkeys(kind for one in each for kind in one["kinds"])
    total = _added([{name: one[name] for name in _ADDED} for one in each])
    for name in ("largest_process_mb", "slowest_command_s"):
        total[name] = max(one[name] for one in each)
    total["exit_codes"] = _added([one["exit_codes"] for one in each])
    total["failures"] = _added([one["failures"] for one in each])
    total["kinds"] = {kind: _added([one["kinds"].get(kind, {}) for one in each]) for kind in kinds}
    for name in ("unconfirmed", "failed"):
        total[name] = [entry for one in each for entry in one[name]]
    _write(output, {"campaigns": campaigns, **known, **total})
    print(json.dumps({"campaigns": campaigns, **known, **total}, indent=1))
    return int(any(total["failures"].values()))


def _why_not_one(each: list[dict[str, Any]]) -> str:
    """Returns why campaigns are not to be added up; empty if they are."""
    states = {one["code"] for one in each}
    if len(states) > 1:
        return f"they are of {len(states)} states of the code"
    seen: dict[tuple[int, str], list[range]] = {}
    for one in each:
        for kind, about in one["kinds"].items():
            numbers = range(one["begin"], one["begin"] + about["inputs"])
            others = seen.setdefault((one["seed"], kind), [])
            if any(numbers.start < o.stop and o.start < numbers.stop for o in others):
                return f"inputs of seed {one['seed']} from {numbers.start} on are in two of them"
            others.append(numbers)
    return ""


def _added(each: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns sums by name, and the largest of what is the slowest; counts of counts as well."""
    names = dict.fromkeys(name for one in each for name in one)
    out: dict[str, Any] = {}
    for name in names:
        found = [one[name] for one in each if name in one]
        if isinstance(found[0], dict):
            out[name] = _added(found)
        else:
            out[name] = max(found) if name == "slowest_s" else round(sum(found), 2)
    return out


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
    seconds = time.monotonic() - began
    inputs = tally.inputs.total()
    return {
        "seconds": round(seconds),
        "cpu_seconds": _cpu_seconds(),
        "stopped": tally.stopped,
        "inputs": inputs,
        "inputs_per_second": round(inputs / max(seconds, 1e-9)),
        "distinct": len(set(tally.digests)),
        "read_by_a_worker_with_limits": tally.by_worker,
        "checked_by_the_command": tally.by_command,
        "largest_process_mb": tally.memory >> 20,
        "slowest_command_s": round(tally.slowest_command, 2),
        "compared_with_their_own_reader": tally.compared.total(),
        "exit_codes": _counts(sum(tally.codes.values(), Counter())),
        "failures": wrong,
        "unconfirmed": [list(entry) for entry in tally.unconfirmed[:100]],
        "kinds": {
            kind: {
                "inputs": tally.inputs[kind],
                "slowest_s": round(tally.slowest.get(kind, 0.0), 2),
                "cpu_s": round(tally.spent.get(kind, 0.0), 2),
                **dict(sorted(verdicts.items())),
                "compared": tally.compared[kind],
                "exit_codes": _counts(tally.codes[kind]),
            }
            for kind, verdicts in tally.verdicts.items()
        },
        "failed": [
            {"kind": one.kind, "number": one.number, "what": one.what, "why": one.why[:200]}
            for one in tally.failures[:100]
        ],
    }


def _counts(codes: Counter[int]) -> dict[str, int]:
    return {str(code): codes[code] for code in sorted(codes)}


def _machine() -> dict[str, Any]:
    """Returns what runs where: the state of the code, Python, its libraries, the machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "code": _state(),
        "commit": _commit(),
        "python": platform.python_version(),
        "libraries": _versions(),
        "cores": os.cpu_count(),
        "machine": f"{platform.system()} {platform.machine()}, {memory >> 30} GiB",
    }


def _versions() -> dict[str, str]:
    out = {}
    for name in _LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            out[name] = metadata.version(name)
    return out


def _state() -> str:
    """Returns a digest of the program, of the fuzzer and of its seeds."""
    digest = hashlib.sha256()
    seeds = {path for kind in KINDS.values() for each in kind.seeds for path in TESTS.glob(each)}
    code = [path for top in ("src", "benchmarks/fuzz") for path in (ROOT / top).rglob("*")]
    for path in sorted({*seeds, *code}):
        if path.is_file() and path.suffix != ".pyc":
            digest.update(f"{path.relative_to(ROOT).as_posix()}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _commit() -> str:
    """Returns the commit, and if anything was changed since; empty where there is no git."""
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],  # noqa: S607
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return ""
    return said.stdout.strip()


def _cpu_seconds() -> int:
    """Returns the processor time of this process and of those that have ended."""
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return round(sum(used.ru_utime + used.ru_stime for used in both))


def _write(path: Path | None, figures: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
