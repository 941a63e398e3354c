"""``import nanguard`` is light, and the torch-free half works without torch."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from nanguard.errors import installing


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy"):
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)
sys.meta_path.insert(0, Block())
"""


def test_importing_nanguard_does_not_import_torch_or_rich():
    heavy = run(
        "import sys, nanguard\nprint([m for m in ('torch', 'numpy', 'rich') if m in sys.modules])"
    )
    assert heavy == "[]\n"


def test_importing_nanguard_imports_its_errors_and_nothing_else_of_its_own():
    own = run("import sys, nanguard; print(sorted(m for m in sys.modules if 'nanguard.' in m))")
    assert own == "['nanguard.errors']\n"


def test_the_torch_free_half_works_without_torch():
    out = run(
        BLOCKED + "import nanguard, nanguard.record\n"
        "from nanguard.guard.policy import Policy, Trouble\n"
        "from nanguard.signals import SpikeWindow\n"
        "print(Policy(nanguard.Settings()).bad(Trouble(0)).action.value)\n"
    )
    assert out == "skip\n"


def test_the_command_line_starts_without_torch():
    assert "demo" in run(BLOCKED + "from nanguard.cli.entry import run\nrun(['--help'])")


def test_asking_for_the_guard_without_torch_says_what_is_missing():
    out = run(
        BLOCKED + "import nanguard\n"
        "try:\n    nanguard.Guard\nexcept ImportError as error:\n    print(error)\n"
    )
    assert "[torch]'" in out


def test_a_name_that_does_not_exist():
    out = run("import nanguard\ntry:\n    nanguard.Gard\nexcept AttributeError as e:\n    print(e)")
    assert out == "module 'nanguard' has no attribute 'Gard'\n"


def test_dir_lists_what_is_public():
    assert "Guard" in run("import nanguard; print(dir(nanguard))")


@pytest.mark.parametrize(
    ("where_from", "command"),
    [
        (
            '{"url": "file:///home/a%20clone", "dir_info": {}}',
            "pip install '/home/a clone[serve]'",
        ),
        ('{"url": "https://example.org/x.whl"}', "pip install 'nanguard[serve]'"),
        (None, "pip install 'nanguard[serve]'"),
        ("broken", "pip install 'nanguard[serve]'"),
    ],
)
def test_what_is_missing_is_installed_from_where_nanguard_came(
    monkeypatch: pytest.MonkeyPatch, where_from: str | None, command: str
):
    found = SimpleNamespace(read_text=lambda _name: where_from)
    monkeypatch.setattr("importlib.metadata.distribution", lambda _name: found)
    assert installing("serve") == command
