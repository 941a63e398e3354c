"""What the documentation needs beside its pages: those of the example systems, and names.

The pages of the systems lie beside their code. What the theme leaves without a name, a screen
reader cannot tell.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.structure.pages import Page

_EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# How a page in stories/ links to a system, so that the link works in the repository, too.
_LINK = re.compile(r"\(\.\./\.\./examples/(\w+)/README\.md\)")


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


def on_page_markdown(markdown: str, *, page: Page, config: Any, files: Files) -> str:
    """Points links to a system in the repository to its page here."""
    del config, files
    return _LINK.sub(r"(\1.md)", markdown) if page.file.src_uri.startswith("stories/") else markdown


def on_post_page(output: str, *, page: Page, config: Any) -> str:
    """Names the search, and makes cells of header cells that are empty."""
    del page, config
    return re.sub(r"<th( [^>]*)?></th>", "<td></td>", _named(output))


def on_post_template(output: str, *, template_name: str, config: Any) -> str:
    """Names the search on the page that a server shows where there is none."""
    del config
    return _named(output) if template_name == "404.html" else output


def _named(page: str) -> str:
    return page.replace('role="dialog"', 'role="dialog" aria-label="Search"', 1)
