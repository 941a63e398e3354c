"""Explains the PyTorch scripts of GRIST, a public collection of numerical bugs, as published.

The collection (github.com/Jacob-yen/GRIST, ESEC/FSE 2021) changes the inputs of small scripts until
a loss is not finite; its helper then ends the script before ``backward``. A script counts if it
comes to that end here without nanguard: some need packages or data that are not there.

    python -m benchmarks.grist FOLDER_OF_THE_COLLECTION [--output results.json]

Right is: one incident, whose line is the one that takes the logarithm of a saturated sigmoid or
softmax, which all of them do, and ``log-or-sqrt-domain`` as its cause.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.recording import environment

_SRC = Path(__file__).resolve().parents[1] / "src"
# Seconds for one script, without and with a guard, on a busy machine.
_LONGEST = 300
_END = "Success to find NaN"


def scripts_in(folder: Path) -> list[Path]:
    """Returns the scripts of the collection that use torch and stand by themselves."""
    found = sorted(folder.glob("scripts/study_case/ID_*/*_grist.py"))
    return [path for path in found if "import torch" in path.read_text(encoding="utf-8")]


def run(words: list[str], script: Path, root: Path) -> str:
    """Runs a script in its folder; returns what it said."""
    paths = [str(_SRC), str(root), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "MPLBACKEND": "Agg"}
    command = [*words, sys.executable, script.name]
    try:
        done = subprocess.run(  # noqa: S603
            command, cwd=script.parent, env=env, capture_output=True, text=True,
            timeout=_LONGEST, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout + done.stderr


def judged(script: Path, root: Path) -> dict[str, Any]:
    """Runs a script under the guard; returns what was found."""
    with tempfile.TemporaryDirectory() as place:
        words = [sys.executable, "-m", "nanguard", "run", "--incidents", place, "--"]
        run(words, script, root)
        found = [json.loads(p.read_text()) for p in sorted(Path(place).glob("*/incident.json"))]
    origin = (found[0].get("origin") if found else None) or {}
    cause = found[0]["cause"] if found else {}
    first = (found[0].get("fixes") or [{}])[0] if found else {}
    at_log = origin.get("op") == "aten.log" and Path(origin.get("file") or "").name == script.name
    return {
        "script": f"{script.parent.name}/{script.name}",
        "incidents": len(found),
        "line": origin.get("line"),
        "line_right": at_log and "log(" in (origin.get("code") or ""),
        "cause": cause.get("code"),
        "cause_right": cause.get("code") == "log-or-sqrt-domain",
        "confidence": cause.get("confidence"),
        "first_fix": first.get("summary"),
        "verified": bool(first.get("verified")),
    }


def main() -> None:
    """Runs all of them, and counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    root = args.folder.resolve()
    rows = []
    for script in scripts_in(root):
        if _END not in run([], script, root):
            print(f"{script.parent.name}/{script.name}: does not run here", file=sys.stderr)
            continue
        rows.append(judged(script, root))
        print(json.dumps(rows[-1]), flush=True)
    result = {
        "environment": {**environment(), "command": "python -m benchmarks.grist GRIST"},
        "scripts": len(rows),
        "noticed": sum(row["incidents"] > 0 for row in rows),
        "line": sum(row["line_right"] for row in rows),
        "cause": sum(row["cause_right"] for row in rows),
        "first_fix_verified": sum(row["verified"] for row in rows),
        "rows": rows,
    }
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}, indent=1))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
