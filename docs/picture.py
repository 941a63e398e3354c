"""Makes the pictures of README and documentation, from real runs.

python docs/picture.py docs/incident.png    the card of an incident
python docs/picture.py docs/report.png      the report of the demo
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

from nanguard import demo_train, incident
from nanguard.view.report.html import page
from nanguard.view.report.verdict import judge
from nanguard.view.report.words import sentence
from nanguard.view.runs import find_runs, open_run

# Width and height in the units of a page; pictures have twice as many points.
SIZES = {"incident.png": "860,920", "report.png": "1180,1640"}
# The card without what a second look is for.
CARD = """<style>
header, nav, h2, .of-run, section:not([aria-labelledby=incidents]), article details,
article > div:has(table), article > dl, article > p:last-child, .where dl, footer,
.fixes li:not(:first-child) { display: none !important }
main, body { padding: 0 !important; margin: 0 auto !important }
article.incident { margin: 8px !important }
</style></head>"""
# The key under which a picture says what it shows, so that a test can tell whether it still does.
SHOWS = "Description"


def make_incident(folder: Path) -> dict[str, object]:
    """Runs the demo's script under the guard in a folder; returns its incident."""
    shutil.copy(demo_train.__file__, folder / "train.py")
    words = ["-m", "nanguard", "run", "-q", "--run-dir", ".", "--", sys.executable, "train.py"]
    subprocess.run([sys.executable, *words], cwd=folder, check=True)  # noqa: S603
    (path,) = folder.glob("*/incident.json")
    return incident.read(path)


def shown(found: dict[str, object]) -> str:
    """Returns what the card of an incident says: what happened, and the verified change."""
    fix = next(one for one in found["fixes"] if one["verified"])  # type: ignore[attr-defined]
    return f"{sentence(found)}\n{fix['summary']}\n{fix['diff']}"


def description(picture: bytes) -> str:
    """Returns what a picture says that it shows."""
    at = 8
    while at < len(picture):
        (size,) = struct.unpack(">I", picture[at : at + 4])
        kind, data = picture[at + 4 : at + 8], picture[at + 8 : at + 8 + size]
        if kind == b"iTXt" and data.startswith(SHOWS.encode()):
            return data.split(b"\0", 5)[5].decode()
        at += size + 12
    return ""


def _described(picture: bytes, text: str) -> bytes:
    data = SHOWS.encode() + b"\0\0\0\0\0" + text.encode()
    chunk = b"iTXt" + data
    made = struct.pack(">I", len(data)) + chunk + struct.pack(">I", zlib.crc32(chunk))
    head = 8 + 25  # the signature, and the first chunk
    return picture[:head] + made + picture[head:]


def _page_of_incident(folder: Path) -> tuple[str, str]:
    found = make_incident(folder)
    runs = [open_run(one) for one in find_runs([folder])]
    for run in runs:
        judge(run)
    # The page allows no style but its own.
    html = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page(runs, "Incident"))
    return html.replace("</head>", CARD, 1), shown(found)


def _page_of_demo(folder: Path) -> tuple[str, str]:
    run = [sys.executable, "-m", "nanguard", "demo", "--run-dir", "demo", "--quiet"]
    subprocess.run(run, cwd=folder, check=True, stdout=subprocess.DEVNULL)  # noqa: S603
    return (folder / "demo/report.html").read_text(encoding="utf-8"), "the report of the demo"


def main() -> None:
    """Makes one picture."""
    target = Path(sys.argv[1]).resolve()
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        print(f"no chromium: {target.name} stays as it is")  # noqa: T201
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make = _page_of_incident if target.name == "incident.png" else _page_of_demo
        html, text = make(folder)
        (folder / "page.html").write_text(html, encoding="utf-8", errors="backslashreplace")
        picture = folder / "picture.png"
        words = [browser, "--headless", "--no-sandbox", "--hide-scrollbars", "--disable-gpu"]
        words += [f"--window-size={SIZES[target.name]}", "--virtual-time-budget=5000"]
        words += ["--force-device-scale-factor=2"] if target.name == "incident.png" else []
        words += [f"--screenshot={picture}", (folder / "page.html").as_uri()]
        subprocess.run(words, check=True, capture_output=True, timeout=120)  # noqa: S603
        target.write_bytes(_described(picture.read_bytes(), text))


if __name__ == "__main__":
    main()
