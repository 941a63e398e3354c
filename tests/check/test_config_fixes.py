"""``--fix`` of configurations: values only, where their reader is known, and nothing besides."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from nanguard.check.config_fixes import Announced, difference, loaded
from nanguard.cli.checking import run_check
from nanguard.cli.commands.before import CheckOptions
from nanguard.errors import SourceError
from nanguard.findings import Edit, Fix

if TYPE_CHECKING:
    from pathlib import Path

HUGE = "lr: 1.0e-4\nepochs: 3\nbatch_size: 8\nmax_grad_norm: 1.0e+6\n"


def fixed(folder: Path, config: str, code: str | None = None, *, unsafe: bool = False) -> str:
    """Returns the repaired copy of a configuration; nothing if none was written."""
    (folder / "run.yaml").write_text(config)
    if code is not None:
        (folder / "train.py").write_text(code)
    out = folder.parent / "report.txt"
    asked = CheckOptions((str(folder),), fix=True, unsafe=unsafe, output=out, no_cache=True, jobs=1)
    run_check(asked)
    assert (folder / "run.yaml").read_text() == config
    copy = folder / "run_fixed.yaml"
    return copy.read_text() if copy.exists() else ""


@pytest.mark.parametrize(
    ("code", "unsafe", "is_fixed"),
    [
        (None, False, True),
        ('clip = cfg["max_grad_norm"]\n', False, True),
        ('clip = cfg["clip"]\n', False, False),
        ('clip = cfg["clip"]\n', True, True),
    ],
)
def test_a_value_is_changed_where_the_code_reads_it(
    code: str | None, unsafe: bool, is_fixed: bool, tmp_path: Path
):
    folder = tmp_path / "p"
    folder.mkdir()
    copy = fixed(folder, HUGE, code, unsafe=unsafe)
    assert copy == (HUGE.replace("1.0e+6", "1.0") if is_fixed else "")


def test_code_around_a_configuration_that_is_named_alone_is_asked(tmp_path: Path):
    for name, content in (
        ("requirements.txt", "torch\n"),
        ("src/train.py", 'clip = cfg["clip"]\n'),
        ("conf/run.yaml", HUGE),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    conf = tmp_path / "conf" / "run.yaml"
    out = tmp_path / "report.txt"
    run_check(CheckOptions((str(conf),), fix=True, output=out, no_cache=True, jobs=1))
    assert not (tmp_path / "conf" / "run_fixed.yaml").exists()
    (tmp_path / "src/train.py").write_text('clip = cfg["max_grad_norm"]\n')
    run_check(CheckOptions((str(conf),), fix=True, output=out, no_cache=True, jobs=1))
    assert (tmp_path / "conf" / "run_fixed.yaml").exists()


def test_a_key_is_renamed_only_if_asked_for(tmp_path: Path):
    folder = tmp_path / "p"
    folder.mkdir()
    wrong = HUGE.replace("max_grad_norm: 1.0e+6", "max_grad_nrom: 1.0")
    assert fixed(folder, wrong) == ""
    assert "max_grad_norm: 1.0" in fixed(folder, wrong, unsafe=True)


def test_the_family_s_own_reader_is_enough(tmp_path: Path):
    folder = tmp_path / "p"
    folder.mkdir()
    (folder / "train.py").write_text("print('nothing is read here')\n")
    config = {"train_batch_size": 8, "gradient_clipping": 1e6, "zero_optimization": {"stage": 2}}
    (folder / "ds.json").write_text(json.dumps(config))
    report = tmp_path / "report.txt"
    run_check(CheckOptions((str(folder),), fix=True, output=report, no_cache=True, jobs=1))
    copy = json.loads((folder / "ds_fixed.json").read_text())
    assert copy == {**config, "gradient_clipping": 1.0}


def test_a_copy_that_differs_in_more_than_was_announced_is_refused():
    fix = Fix("write 2", edits=(Edit(0, 1, "2"),))
    announced = Announced("a.yaml", unsafe=True)
    announced.keys[fix] = frozenset({"a"})
    announced.check(b"a: 1\nb: 1\n", b"a: 2\nb: 1\n", [fix])
    with pytest.raises(SourceError, match="differ in b as well"):
        announced.check(b"a: 1\nb: 1\n", b"a: 2\nb: 2\n", [fix])


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("a.yaml", b"x: {y: [1, 2]}\n", b"x: {y: [1, 3]}\n"),
        ("a.json", b'{"x": {"y": [1, 2]}}', b'{"x": {"y": [1, 3]}}'),
        ("a.toml", b"[x]\ny = [1, 2]\n", b"[x]\ny = [1, 3]\n"),
    ],
)
def test_files_are_compared_as_programs_read_them(name: str, before: bytes, after: bytes):
    assert difference(loaded(name, before), loaded(name, after)) == {"x.y.1"}
    assert difference(loaded(name, before), loaded(name, before + b"\n")) == set()
