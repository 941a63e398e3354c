"""Runs a script under ``nanguard run``, as its user would, and returns what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def found_in(folder: Path, script: str, step: int | None = None, *options: str) -> dict[str, Any]:
    """Returns the incident of a step, or the first one of a script."""
    (folder / "train.py").write_text(script)
    guarded = [sys.executable, "-m", "nanguard", "run", "--incidents", "found", *options, "--"]
    subprocess.run(
        [*guarded, sys.executable, "train.py"],
        cwd=folder,
        capture_output=True,
        timeout=180,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    name = "step-*" if step is None else f"step-{step:06d}-rank0"
    first = min(folder.glob(f"found/{name}/incident.json"))
    return json.loads(first.read_text())  # type: ignore[no-any-return]
