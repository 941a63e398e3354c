"""Writing a file so that it is there as a whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file through a new one beside it; what others may do with it stays as it was.

    A link is replaced and not followed: nobody can lead the text elsewhere.

    Args:
        path: The file.
        data: What it shall hold.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
    temporary = path.parent / os.path.basename(name)  # noqa: PTH119 - a name, not a path
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(_mode(path))
        temporary.replace(path)
    except BaseException:  # Ctrl-C, too, and it goes on
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def own_folder(folder: Path) -> None:
    """Makes a folder for files of ours, which version control overlooks.

    Raises:
        OSError: It cannot be made, or it is a link to somewhere else.
    """
    if folder.is_symlink() or folder.parent.is_symlink():
        raise OSError(0, "it is a link to somewhere else", str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / ".gitignore"
    if not mark.is_symlink() and not mark.exists():
        write_atomically(mark, b"*\n")


def _mode(path: Path) -> int:
    try:
        status = path.lstat().st_mode
    except FileNotFoundError:
        status = None
    if status is None or stat.S_ISLNK(status):
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask
    return stat.S_IMODE(status)
