"""Waits, in a process of the user's, until torch is imported. Costs nothing before that."""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard.run.control import REACHED, from_environment, leave

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from nanguard.run.control import Options


def attach() -> None:
    """Makes the import of torch bring the guard with it."""
    options = from_environment()
    if options is None or "torch" in sys.modules:
        return
    if options.again is not None:
        _hold_back(programs=bool(options.again.get("held")))
    # Both the file in site-packages and the folder on PYTHONPATH come here.
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(options))


def _hold_back(*, programs: bool) -> None:
    """Lets a second run of the command touch nothing, from the script's first line on.

    Args:
        programs: Whether it may start others before torch is there: the kernel holds them, too.
    """
    from nanguard.replay.sandbox import Outside, everywhere

    if everywhere() is None and not is_launcher():
        folder = tempfile.mkdtemp(prefix="nanguard-replay-")
        Outside(Path(folder), programs=programs).for_good()


def is_launcher() -> bool:
    """Returns whether this process only starts those that train."""
    words = [Path(word).name for word in sys.orig_argv[:4]]
    modules = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
    if "-m" in words[:-1] and words[words.index("-m") + 1] in modules:
        return True
    return bool({"torchrun", "accelerate", "deepspeed"} & set(words[:3]))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds torch as everyone else does, and hears when it is there."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._asking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns torch's spec, with a loader that calls us when it is done."""
        if name != "torch" or self._asking:
            return None
        # Before torch is there: whoever sees torch in this process must find the note.
        leave(Path(self._options.control), f"{REACHED}{os.getpid()}")
        # Whoever only asks whether torch is there does not load what is found.
        self._asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec

    def loaded(self) -> None:
        """Guards what will be made with torch, which is there now."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        try:
            from nanguard.run.live import begin

            begin(self._options)
        except Exception as error:  # noqa: BLE001 - the script must run, guarded or not
            from nanguard.run.waiting import tell_user

            tell_user(f"nanguard: this process is not guarded: {error!r}")


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Makes the module as its own loader does."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Runs the module, and says that it is there."""
        self._loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._finder.loaded()
