"""Makes the picture of a report that README and documentation show, from the real demo.

python docs/picture.py docs/report.png
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_SIZE = "1180,1640"


def main() -> None:
    """Runs the demo, opens its report in a browser, and keeps what is seen."""
    target = Path(sys.argv[1]).resolve()
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        print(f"no chromium: {target.name} stays as it is")
        return
    with tempfile.TemporaryDirectory() as scratch:
        run = [sys.executable, "-m", "nanguard", "demo", "--run-dir", "demo", "--quiet"]
        subprocess.run(run, cwd=scratch, check=True, stdout=subprocess.DEVNULL)
        picture = Path(scratch, "report.png")
        words = [browser, "--headless", "--no-sandbox", "--hide-scrollbars", "--disable-gpu"]
        words += [f"--window-size={_SIZE}", "--virtual-time-budget=5000"]
        words += [f"--screenshot={picture}", f"file://{scratch}/demo/report.html"]
        subprocess.run(words, check=True, capture_output=True, timeout=120)
        shutil.copy(picture, target)


if __name__ == "__main__":
    main()
