"""``nanguard preset``: prints a stable configuration, or writes it."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from nanguard.advice.preset_files import files_of
from nanguard.advice.presets import Choice
from nanguard.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from nanguard.advice.preset_files import File
    from nanguard.cli.commands.before import PresetOptions


def run_preset(options: PresetOptions) -> None:
    """Prints the files of a preset, or writes them.

    Raises:
        UsageError: A file is there already, or cannot be written.
    """
    files = files_of(
        Choice(options.family, options.level, options.precision, options.task, options.form)
    )
    if options.output is None:
        _print(files)
        return
    targets = _targets(files, options.output)
    if not options.force:
        _refuse_to_replace([path for path, _ in targets])
    for path, file in targets:
        _write(path, file)
        sys.stdout.write(f"{path}\n")


def _print(files: tuple[File, ...]) -> None:
    """Prints files one after the other; what JSON has no room for goes to standard error."""
    for file in files:
        if len(files) > 1:
            sys.stdout.write(f"# ==> {file.name} <==\n")
        sys.stdout.write(file.content)
        sys.stdout.flush()
        sys.stderr.write(file.notes)


def _targets(files: tuple[File, ...], output: Path) -> list[tuple[Path, File]]:
    inside = len(files) > 1 or output.is_dir()
    targets = [(output / file.name if inside else output, file) for file in files]
    for path, file in list(targets):
        if file.notes:
            beside = path.with_name(f"{path.stem}_notes.txt")
            targets.append((beside, replace(file, name=beside.name, content=file.notes)))
    return targets


def _refuse_to_replace(paths: list[Path]) -> None:
    for path in paths:
        if path.exists():
            raise UsageError(
                "there is such a file already.",
                where=str(path),
                do="Choose another name for --output, or add --force to replace it.",
            )


def _write(path: Path, file: File) -> None:
    from nanguard.source.text import write_atomically

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, file.content.encode())
        if file.executable:
            path.chmod(0o755)
    except OSError as error:
        raise UsageError(
            f"the file cannot be written: {error.strerror}.",
            where=str(path),
            do="Choose another place for --output.",
        ) from error
