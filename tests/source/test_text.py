"""Texts within bounds; notebooks: the code in them, and the way back to their lines."""

from __future__ import annotations

import json
import tracemalloc
from typing import TYPE_CHECKING

import pytest

from nanguard.errors import SourceError
from nanguard.source.text import NOTEBOOK_LIMIT, Notebook, read_bytes, read_head

if TYPE_CHECKING:
    from pathlib import Path


def notebook(*sources: object, indent: int | None = 1, **more: object) -> str:
    cells = [{"cell_type": "code", "source": source} for source in sources]
    return json.dumps({"cells": cells, "nbformat": 4, **more}, indent=indent)


def test_lines_lead_back_to_the_file():
    content = notebook(["import torch\n", "x = 1"], ["y = 2\n", "\n", "z = 3\n"])
    book = Notebook.read("n.ipynb", content)
    assert book.code.content == "import torch\nx = 1\ny = 2\n\nz = 3\n\n"
    lines = content.split("\n")
    for line, text, where in (
        (1, '"import torch\\n"', "cell 1, line 1"),
        (2, '"x = 1"', "cell 1, line 2"),
        (5, '"z = 3\\n"', "cell 2, line 3"),
    ):
        number, said = book.place(line)
        assert text in lines[number - 1]
        assert said == where


def test_all_cells_are_counted_and_only_code_is_read():
    cells = [
        {"cell_type": "markdown", "source": ['# \\" cells source [']},
        {"cell_type": "code", "outputs": [{"data": {"source": ["x"]}}], "source": "a = 1\nb = 2"},
    ]
    content = json.dumps({"metadata": {"cells": "source"}, "cells": cells}, indent=2)
    book = Notebook.read("n.ipynb", content)
    assert book.code.content == "a = 1\nb = 2\n"
    number, where = book.place(2)
    assert where == "cell 2, line 2"
    assert '"source": "a = 1' in content.split("\n")[number - 1]


def test_a_notebook_on_one_line():
    book = Notebook.read("n.ipynb", notebook(["a\n", "b"], indent=None))
    assert book.place(2) == (1, "cell 1, line 2")


@pytest.mark.parametrize(
    ("cell", "code"),
    [
        ("%matplotlib inline\nx = 1", "pass\nx = 1\n"),
        ("if a:\n    !pip install torch\n", "if a:\n    pass\n\n"),
        ("files = !ls\nx = 1", "files = None\nx = 1\n"),
        ("t = %timeit -o f()", "t = None\n"),
        ("torch.load?", "pass\n"),
        ("?torch.load", "pass\n"),
        ("%%bash\nrm -rf /", "\n\n"),
        ("%%time\nx = 1", "pass\nx = 1\n"),
        ("x = (a\n % b)", "x = (a\n % b)\n"),
        ('s = """\n%d items\n!"""', 's = """\n%d items\n!"""\n'),
        ("await f()", "await f()\n"),
    ],
)
def test_what_only_ipython_understands_is_taken_out(cell: str, code: str):
    assert Notebook.read("n.ipynb", notebook(cell)).code.content == code


def test_a_cell_that_is_no_python_is_named_and_the_others_count():
    book = Notebook.read("n.ipynb", notebook("x = (", "y = 2"))
    assert book.code.content == "\ny = 2\n"
    assert [cell for cell, _ in book.broken] == ["cell 1"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"cells": [', "not complete JSON"),
        ("[" * 100_000, "not complete JSON"),
        ("[]", "has no cells"),
        ('{"worksheets": []}', "has no cells"),
        (notebook("x", metadata={"kernelspec": {"language": "R"}}), "its code is r, not Python"),
    ],
)
def test_a_broken_notebook_is_refused(content: str, says: str):
    with pytest.raises(SourceError, match=says):
        Notebook.read("n.ipynb", content)


def test_odd_cells_do_no_harm():
    content = json.dumps(
        {"cells": [1, None, {"cell_type": "code"}, {"cell_type": "code", "source": [1]}]}
    )
    assert Notebook.read("n.ipynb", content).code.content == "\n\n"


def test_a_small_file_takes_little_memory_whatever_the_limit(tmp_path: Path):
    """Python takes all the memory that it is asked to read, and a process may have less left."""
    path = tmp_path / "n.ipynb"
    path.write_bytes(b"x" * 300_000)
    tracemalloc.start()
    try:
        assert read_bytes(str(path), NOTEBOOK_LIMIT) == path.read_bytes()
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [299_999, 300_000])
def test_a_file_is_read_up_to_its_limit(size: int, tmp_path: Path):
    path = tmp_path / "a.py"
    path.write_bytes(bytes(range(250)) * 1200)
    assert read_head(str(path), size) == path.read_bytes()[:size]
    if size < 300_000:
        with pytest.raises(SourceError, match="it is larger than 292 KB"):
            read_bytes(str(path), size)
    else:
        assert read_bytes(str(path), size) == path.read_bytes()
