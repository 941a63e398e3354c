"""Brings the pages of the example systems, which lie beside their code, into the documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def on_files(files: Files, *, config: Any) -> Files:
    """Adds each system's page and its picture."""
    for story in sorted(_EXAMPLES.glob("*/story.yaml")):
        folder = story.parent
        text = (folder / "README.md").read_text(encoding="utf-8")
        # Each system's picture has the same name beside its code; here they share a folder.
        text = text.replace("(curves.png)", f"({folder.name}.png)")
        files.append(File.generated(config, f"stories/{folder.name}.md", content=text))
        if (folder / "curves.png").exists():
            picture = str(folder / "curves.png")
            files.append(File.generated(config, f"stories/{folder.name}.png", abs_src_path=picture))
    return files
