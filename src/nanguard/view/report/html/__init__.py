"""The page about runs.

``page(runs)`` returns one self-contained HTML text. For pages that stay alive:
``sections(runs)`` returns the parts of the body by anchor, ``page_data(runs)`` what the script
draws (``nanguard.page/1``), ``asset("page.js")`` and ``asset("page.css")`` the script and the
style. In the page, ``window.nanguard.show(data)`` draws, and called again with newer data it
redraws and keeps zoom, cursor and choices.
"""

from nanguard.view.report.html.page import (
    asset,
    body_of,
    embedded,
    page,
    page_data,
    sections,
    title_of,
)

__all__ = ["asset", "body_of", "embedded", "page", "page_data", "sections", "title_of"]
