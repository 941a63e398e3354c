"""Which torch a project asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nanguard.check.code.code import Code
from nanguard.check.code.project import torch_floor
from nanguard.check.code.rules.unsafe_checkpoint_load import UnsafeCheckpointLoad
from nanguard.source.text import Text

if TYPE_CHECKING:
    from pathlib import Path

LOAD = 'import torch\n\nstate = torch.load("last.pt")\n'


@pytest.mark.parametrize(
    ("file", "text", "floor"),
    [
        ("pyproject.toml", 'dependencies = ["torch>=2.6"]\n', (2, 6)),
        ("requirements.txt", "torchvision>=0.20\ntorch >= 2.4.1\n", (2, 4)),
        ("setup.py", "install_requires=['torch>=1.13', 'torch>=2.6']\n", (1, 13)),
        ("requirements.txt", "pytorch-lightning>=2.6\ntorch\n", None),
    ],
)
def test_the_floor_is_read_from_the_files_around(tmp_path: Path, file, text, floor):
    (tmp_path / file).write_text(text)
    (tmp_path / "src" / "deep").mkdir(parents=True)
    assert torch_floor(str(tmp_path / "src" / "deep" / "train.py")) == floor


def test_a_load_is_safe_where_torch_is_new_enough(tmp_path: Path):
    (tmp_path / "requirements.txt").write_text("torch>=2.6\n")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "requirements.txt").write_text("torch>=2.4\n")
    rule = UnsafeCheckpointLoad()

    def found(path: Path, text: str = LOAD) -> int:
        return len(list(rule.check(Code.parse(Text(str(path), text)))))

    assert found(tmp_path / "train.py") == 0
    assert found(tmp_path / "old" / "train.py") == 1
    told = LOAD.replace('"last.pt"', '"last.pt", weights_only=False')
    assert found(tmp_path / "train.py", told) == 1
