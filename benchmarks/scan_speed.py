"""How fast data, checkpoints and logs are scanned, each against the usual loop, in one run.

    python -m benchmarks.scan_speed            # needs about 20 GB of temporary space, and minutes
    python -m benchmarks.scan_speed --small    # a tenth of it

Runs ``scan_checkpoint``, ``scan_data`` and ``scan_log`` one after the other; each prints its
ratios.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

PARTS = ("scan_checkpoint", "scan_data", "scan_log")
SMALL = {
    "scan_checkpoint": ["--mb", "200", "--memory-gb", "0.5"],
    "scan_data": ["--lines", "200000", "--memory-lines", "500000"],
    "scan_log": ["--lines", "100000", "--memory-lines", "300000"],
}


def main() -> int:
    """Runs the parts; returns the first exit code that is not 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a tenth of the sizes")
    small = parser.parse_args().small
    code = 0
    for part in PARTS:
        print(f"== {part}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{part}", *(SMALL[part] if small else [])]
        code = code or subprocess.run(command, check=False).returncode  # noqa: S603
    return code


if __name__ == "__main__":
    sys.exit(main())
