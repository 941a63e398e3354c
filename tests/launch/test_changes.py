"""What a replay changes is put back, where the process goes on afterwards."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
import torch
from nanguard.launch.changes import swapped_code, without, without_autocast

TEXT = """
def value(x):
    return x + 1


def outer(change):
    with change():
        return value(1)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module whose code nobody has rewritten."""
    path = tmp_path / "swapped_module.py"
    path.write_text(TEXT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "swapped_module", raising=False)
    return importlib.import_module("swapped_module")


def test_code_is_swapped_and_put_back(module):
    with swapped_code({module.__file__: TEXT.replace("x + 1", "x + 2")}):
        assert module.value(1) == 3
    assert module.value(1) == 2


def test_code_that_is_running_is_refused_and_stays(module):
    changed = TEXT.replace("value(1)", "value(5)").replace("x + 1", "x + 2")
    with pytest.raises(RuntimeError, match="already running"):
        module.outer(lambda: swapped_code({module.__file__: changed}))
    assert module.value(1) == 2


def test_samples_are_replaced_in_a_copy():
    batch = {"x": torch.arange(6.0).reshape(3, 2), "y": [torch.arange(3)]}
    changed = without(batch, [1])
    assert changed["x"].tolist() == [[0, 1], [0, 1], [4, 5]]
    assert changed["y"][0].tolist() == [0, 0, 2]
    assert batch["x"].tolist() == [[0, 1], [2, 3], [4, 5]]


def test_autocast_comes_back():
    x = torch.ones(2, 2)
    with without_autocast(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16


def test_files_can_be_loaded_in_a_wider_type(tmp_path):
    """torch makes its tables of types when it first loads a file; by then float16 is float32."""
    code = """
import sys, types, torch
from nanguard.launch.changes import raise_precision
torch.save({"x": torch.ones(2), "y": torch.ones(2).half()}, sys.argv[1])
torch.storage._dtype_to_storage_type_map.cache_clear()
torch.storage._storage_type_to_dtype_map.cache_clear()
watch = types.SimpleNamespace(named_parameters=dict, buffers=dict, optimizers=list)
raise_precision(torch.float32, watch)
assert torch.float16 is torch.float32
print({name: str(x.dtype) for name, x in torch.load(sys.argv[1], weights_only=True).items()})
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "x.pt")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "{'x': 'torch.float32', 'y': 'torch.float16'}\n", done.stderr
