"""Result files: what was measured, with the commit, the date and the machine it was measured on."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"


def write_results(path: Path, rows: Any) -> None:
    """Writes a result file.

    Args:
        path: Where to.
        rows: What was measured.
    """
    path.write_text(
        json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n", encoding="utf-8"
    )


def environment() -> dict[str, Any]:
    """Returns what a figure needs beside it to mean anything."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "command": _command(),
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "cpu": f"{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "load": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _command() -> str:
    """Returns the command, without the paths of this machine."""
    main = sys.modules["__main__"].__spec__
    name = main.name if main else Path(sys.argv[0]).name
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    return " ".join(["python -m", name, *words])


def _commit() -> str:
    """Returns the commit; a copy without a history says it in NANGUARD_COMMIT."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        return os.environ.get("NANGUARD_COMMIT", "unknown")
    words = [git, "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603
    return done.stdout.strip() or "unknown"


def _processor() -> str:
    try:
        about = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine()  # no Linux
    names = [line.partition(":")[2].strip() for line in about.splitlines() if "model name" in line]
    return names[0] if names else platform.machine()
