"""Which files are looked at."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from nanguard.check.paths import Search
from tests.nobody import as_nobody, open_folder

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x = 1\n")


def found(folder: Path, *paths: str, **more: object) -> list[str]:
    search = Search(root=str(folder), **more)
    return [os.path.relpath(f.path, folder) for f in search.files(paths or [str(folder)])]


def test_a_folder_is_walked_in_order_without_what_is_not_the_project(tmp_path: Path):
    make(tmp_path, "b.py", "a/z.py", "a/b/c.py", ".hydra/config.yaml")
    make(tmp_path, "venv/x.py", "node_modules/x.py", "a/.git/x.py", "lib/site-packages/x.py")
    make(tmp_path, "other/pyvenv.cfg", "other/lib/x.py", "cache/CACHEDIR.TAG", "cache/x.py")
    assert found(tmp_path) == ["b.py", ".hydra/config.yaml", "a/z.py", "a/b/c.py"]


def test_gitignore_is_honoured_nested_and_with_exceptions(tmp_path: Path):
    make(
        tmp_path, "a.py", "out/b.py", "deep/out/c.py", "deep/keep_gen.py", "deep/x_gen.py", "d.tmp"
    )
    (tmp_path / ".gitignore").write_text("# comment\n/out/\n*_gen.py\n*.tmp\n[\n")
    (tmp_path / "deep/.gitignore").write_text("!keep_gen.py\n")
    walked = [name for name in found(tmp_path) if not name.endswith(".gitignore")]
    assert walked == ["a.py", "deep/keep_gen.py", "deep/out/c.py"]


def test_the_gitignore_of_the_repository_counts_below_it(tmp_path: Path):
    make(tmp_path, "src/a.py", "src/skip/b.py", "runs/c.py")
    (tmp_path / ".git/info").mkdir(parents=True)
    (tmp_path / ".git/info/exclude").write_text("b.py\n")
    (tmp_path / ".gitignore").write_text("runs/\n")
    assert found(tmp_path, str(tmp_path / "src")) == ["src/a.py"]
    # Whoever names an ignored folder means it.
    assert found(tmp_path, str(tmp_path / "runs")) == ["runs/c.py"]


def test_exclude_is_relative_to_the_settings_and_spares_what_is_named(tmp_path: Path):
    make(tmp_path, "a.py", "old/b.py", "new/old/c.py")
    assert found(tmp_path, exclude=("/old/",)) == ["a.py", "new/old/c.py"]
    assert found(tmp_path, str(tmp_path / "old/b.py"), exclude=("/old/",)) == ["old/b.py"]


def test_patterns_in_quotes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make(tmp_path, "a.py", "b/c.py", "b/d.yaml", "venv/e.py")
    monkeypatch.chdir(tmp_path)
    search = Search()
    assert [f.path for f in search.files(["**/*.py", "b/c.py"])] == ["a.py", "b/c.py"]
    assert search.existing == 3
    assert search.missed == []
    for pattern in ("b/**", "./**/c.py", f"{tmp_path}/**/**/c.py", "?/**/*.py"):
        assert "b/c.py" in found(tmp_path, pattern), pattern
    assert found(tmp_path, "**/*.txt", "venv/**") == []


def test_loops_of_links_end(tmp_path: Path):
    make(tmp_path, "a/b.py")
    (tmp_path / "a/up").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "self.py").symlink_to(tmp_path / "self.py")
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere.py")
    (tmp_path / "good.py").symlink_to(tmp_path / "a/b.py")
    (tmp_path / "a/again").symlink_to(tmp_path, target_is_directory=True)
    assert found(tmp_path) == ["good.py", "a/b.py"]
    assert found(tmp_path, f"{tmp_path}/**/*.py") == ["a/b.py", "good.py"]
    search = Search()
    assert list(search.files([str(tmp_path / "self.py")])) == []
    assert "symbolic links" in search.missed[0].reason


def test_what_is_no_file_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.py")
    search = Search()
    assert list(search.files([str(tmp_path), str(tmp_path / "pipe.py")])) == []
    assert [m.reason for m in search.missed] == ["it is not a regular file"]


def test_a_folder_that_cannot_be_read_is_named():
    with open_folder() as folder:
        make(folder, "a.py", "closed/b.py")
        (folder / "closed").chmod(0)
        search = Search()
        with as_nobody():
            assert len(list(search.files([str(folder)]))) == 1
        assert search.missed[0].reason == "it cannot be read: Permission denied"


def test_a_repaired_copy_is_left_out_unless_it_is_named(tmp_path: Path):
    make(tmp_path, "a.yaml", "a_fixed.yaml", "alone_fixed.yaml")
    assert found(tmp_path) == ["a.yaml", "alone_fixed.yaml"]
    assert found(tmp_path, str(tmp_path / "a_fixed.yaml")) == ["a_fixed.yaml"]
