"""Found by every Python process below ``nanguard run``, because its folder is on PYTHONPATH.

It attaches nanguard and then lets the environment's own ``sitecustomize`` run, if there is one.
"""

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path


def _attach() -> None:
    try:
        found = importlib.util.find_spec("nanguard")
    except (ImportError, ValueError):
        found = None
    if found is None:
        # The command runs in another environment than nanguard was installed in.
        home = Path(os.environ["NANGUARD_HOME"])
        spec = importlib.util.spec_from_file_location(
            "nanguard", home / "__init__.py", submodule_search_locations=[str(home)]
        )
        if spec is None or spec.loader is None:
            return
        module = importlib.util.module_from_spec(spec)
        sys.modules["nanguard"] = module
        spec.loader.exec_module(module)
    from nanguard.run.attach import attach

    attach()


def _go_on() -> None:
    here = str(Path(__file__).resolve().parent)
    elsewhere = [path for path in sys.path if str(Path(path or ".").resolve()) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("NANGUARD_RUN"):
    try:
        _attach()
    except Exception as error:  # noqa: BLE001 - the script must run, guarded or not
        print(f"nanguard: this process is not guarded: {error!r}", file=sys.stderr)  # noqa: T201
_go_on()
