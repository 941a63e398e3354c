"""``nanguard doctor``: what nanguard can do here, and how to get what is missing.

The Python that trains may be another one than nanguard's own (``pipx``, ``uvx``), so its versions
and devices come from a process of that Python.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard import __version__
from nanguard.errors import UsageError, installing
from nanguard.replay import landlock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.cli.commands.before import DoctorOptions

OK, NOTE, BAD = "ok", "note", "bad"
# Seconds the other Python has to import torch and look at its devices: cold file systems are slow.
_LIMIT = 120.0
_OLDEST_PYTHON = (3, 10)
_OLDEST_TORCH = (2, 4)
# What each extra is for, and a module by which it is recognised.
_EXTRAS = {
    "scan": ("polars", "reading data and checkpoints with nanguard check"),
    "serve": ("uvicorn", "nanguard serve"),
    "plot": ("matplotlib", "nanguard report --png"),
    "lsp": ("pygls", "the language server"),
    "remote": ("fsspec", "paths on s3:// and other remote file systems"),
}
# Run by the Python that trains; needs nothing of nanguard there, nor anything of this folder.
_QUESTIONS = """
import sys
sys.path[:] = [path for path in sys.path if path]
import importlib.util, json, os
facts = {"python": list(sys.version_info[:3]), "executable": sys.executable}
facts["monitoring"] = hasattr(sys, "monitoring")
spec = importlib.util.find_spec("nanguard")
facts["nanguard"] = spec.origin if spec else None
facts["pth"] = any(os.path.exists(os.path.join(p, "nanguard-run.pth")) for p in sys.path if p)
try:
    import torch
    facts["torch"] = torch.__version__
    facts["cuda"] = torch.version.cuda
    facts["devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    facts["mps"] = bool(getattr(torch.backends, "mps", None) and torch.backends.mps.is_available())
except ImportError as error:
    facts["error"] = str(error)
print(json.dumps(facts))
"""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One thing that was looked at.

    Attributes:
        verdict: ``ok``, ``note`` for something that can do without, or ``bad``.
        what: The thing.
        found: What was found.
        do: What to do about it; empty if nothing is to be done.
    """

    verdict: str
    what: str
    found: str
    do: str = ""


def run_doctor(options: DoctorOptions) -> int:
    """Prints what can be done here; returns 1 if ``nanguard run`` cannot work."""
    diagnoses = list(look(options.python))
    broken = any(one.verdict == BAD for one in diagnoses)
    if options.form == "json":
        sys.stdout.write(json.dumps([asdict(one) for one in diagnoses], indent=1) + "\n")
        return int(broken)
    wide = max(len(one.what) for one in diagnoses)
    for one in diagnoses:
        sys.stdout.write(f"  {_mark(one.verdict)}  {one.what:{wide}}  {one.found}\n")
        if one.do:
            sys.stdout.write(f"  {'':4}  {'':{wide}}  -> {one.do}\n")
    last = "nanguard run cannot work here." if broken else "nanguard run works here."
    sys.stdout.write(f"\n{last}\n")
    return int(broken)


def look(python: str | None = None) -> Iterator[Diagnosis]:
    """Yields what nanguard finds here.

    Args:
        python: The Python that trains; None to choose it.
    """
    own = f"{__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield Diagnosis(OK, "nanguard", own)
    chosen = _python(python)
    if chosen is None:
        yield Diagnosis(
            BAD, "python", "no python was found on the PATH", "Name it: nanguard doctor --python"
        )
        return
    facts = _ask(chosen)
    yield _of_python(facts, chosen)
    if "executable" not in facts:
        return
    yield _of_torch(facts)
    yield from _of_devices(facts)
    yield _of_attaching(facts)
    yield _of_monitoring(facts)
    yield _of_landlock()
    yield _of_writing(Path.cwd())
    yield from _of_extras()


def _python(named: str | None) -> str | None:
    """Returns the Python that trains: the one that is named, this one if it has torch, or another.

    Raises:
        UsageError: The one that is named is not there.
    """
    if named is not None:
        found = shutil.which(named)
        if found is None:
            raise UsageError(
                f"{named!r} is not a program that can be run.",
                where="nanguard doctor --python",
                do="Give the path of a Python, such as /opt/conda/bin/python.",
            )
        return found
    if importlib.util.find_spec("torch") is not None:
        return sys.executable
    return shutil.which("python") or shutil.which("python3")


def _ask(python: str) -> dict[str, Any]:
    try:
        done = subprocess.run(  # noqa: S603 - a Python that the user has chosen
            [python, "-c", _QUESTIONS],
            capture_output=True,
            text=True,
            timeout=_LIMIT,
            check=False,
        )
        facts = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": f"it did not answer within {_LIMIT:g} s"}
    except OSError as error:
        return {"error": f"it cannot be run: {error.strerror}"}
    except (ValueError, IndexError):
        lines = done.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"it ended with {done.returncode}"}
    return dict(facts)


def _of_python(facts: dict[str, Any], python: str) -> Diagnosis:
    if "executable" not in facts:
        do = "Name the Python that trains: nanguard doctor --python PYTHON"
        return Diagnosis(BAD, "python", f"{python}: {facts['error']}", do)
    version = ".".join(map(str, facts["python"]))
    if tuple(facts["python"][:2]) < _OLDEST_PYTHON:
        return Diagnosis(BAD, "python", f"{version} at {facts['executable']}", "Use 3.10 or newer.")
    return Diagnosis(OK, "python", f"{version} at {facts['executable']}")


def _of_torch(facts: dict[str, Any]) -> Diagnosis:
    version = facts.get("torch")
    if version is None:
        return Diagnosis(
            BAD,
            "torch",
            f"not importable: {facts.get('error', 'missing')}",
            "Install it there, or name another Python: nanguard doctor --python PYTHON. "
            "nanguard check needs no torch.",
        )
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal())
    if numbers < _OLDEST_TORCH:
        return Diagnosis(BAD, "torch", version, "nanguard run needs torch 2.4 or newer.")
    return Diagnosis(OK, "torch", version)


def _of_devices(facts: dict[str, Any]) -> Iterator[Diagnosis]:
    if "torch" not in facts:
        return
    names = list(facts.get("devices") or [])
    if names:
        counted = {name: names.count(name) for name in names}
        listed = ", ".join(f"{count} x {name}" for name, count in counted.items())
        yield Diagnosis(OK, "devices", f"{listed} (CUDA {facts['cuda']})")
    elif facts.get("cuda") and shutil.which("nvidia-smi"):
        yield Diagnosis(
            NOTE,
            "devices",
            f"no GPU is visible to torch, which was built for CUDA {facts['cuda']}",
            "Look at nvidia-smi and $CUDA_VISIBLE_DEVICES.",
        )
    else:
        yield Diagnosis(OK, "devices", "MPS" if facts.get("mps") else "CPU only")


def _of_attaching(facts: dict[str, Any]) -> Diagnosis:
    """Says whether processes with a PYTHONPATH of their own are reached, too."""
    if facts.get("pth"):
        return Diagnosis(OK, "reach", "every process of this Python, however it is launched")
    where = "beside its torch" if facts.get("nanguard") else "in that Python"
    return Diagnosis(
        NOTE,
        "reach",
        "through PYTHONPATH only; a launcher that clears it starts unguarded processes",
        f"Install nanguard {where}: {facts['executable']} -m {installing()}",
    )


def _of_monitoring(facts: dict[str, Any]) -> Diagnosis:
    if facts.get("monitoring"):
        return Diagnosis(OK, "replay", "steps are followed with sys.monitoring")
    return Diagnosis(
        OK, "replay", "steps are followed at backward() (sys.monitoring needs Python 3.12)"
    )


def _of_landlock() -> Diagnosis:
    version = landlock.version()
    if version:
        return Diagnosis(OK, "sandbox", f"Landlock {version}: second runs cannot write files")
    return Diagnosis(
        NOTE,
        "sandbox",
        "no Landlock: what cannot be replayed in place is not run a second time by itself",
        "Linux 6.2 or newer has it; containers must allow the system call. Until then: "
        "nanguard replay --explain --yes",
    )


def _of_writing(folder: Path) -> Diagnosis:
    place = folder / ".nanguard"
    where = place if place.is_dir() else folder
    try:
        with tempfile.TemporaryFile(dir=where):
            free = shutil.disk_usage(where).free >> 20
    except OSError as error:
        return Diagnosis(
            BAD,
            "write access",
            f"{where} cannot be written to: {error.strerror}",
            "Start it elsewhere, or: nanguard run --incidents DIR -- ...",
        )
    if free < 1 << 10:
        return Diagnosis(
            NOTE, "write access", f"{place}, but only {free} MiB are free", "Make room on the disk."
        )
    return Diagnosis(OK, "write access", f"{place} ({free >> 10} GiB free)")


def _of_extras() -> Iterator[Diagnosis]:
    for extra, (module, purpose) in _EXTRAS.items():
        if importlib.util.find_spec(module) is not None:
            version = _version(module)
            yield Diagnosis(OK, extra, f"{module}{version}: {purpose}")
        else:
            yield Diagnosis(NOTE, extra, f"not installed: {purpose}", installing(extra))


def _version(module: str) -> str:
    try:
        return f" {importlib.metadata.version(module)}"
    except importlib.metadata.PackageNotFoundError:
        return ""


def _mark(verdict: str) -> str:
    words = {OK: "ok  ", NOTE: "note", BAD: "BAD "}
    colours = {OK: "32", NOTE: "33", BAD: "1;31"}
    plain = "NO_COLOR" in os.environ or not sys.stdout.isatty()
    return words[verdict] if plain else f"\x1b[{colours[verdict]}m{words[verdict]}\x1b[0m"
