"""Where in the user's code something happens."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nanguard
from nanguard.replay.tracer import sites
from nanguard.replay.tracer.sites import here

PACKAGE = """
def backward(call):
    return call()

def fit(call):
    return backward(call)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package."""
    path = tmp_path / "site-packages" / "framework.py"
    monkeypatch.setattr(sites, "_SITE", (str(path.parent),))
    names = {}
    exec(compile(PACKAGE, str(path), "exec"), names)
    return names


def test_place_of_a_call(package):
    assert here().function == "test_place_of_a_call"


def test_package_that_hands_a_call_on_is_passed_over(package):
    site = package["backward"](here)
    assert (site.file, site.function) == (
        __file__,
        "test_package_that_hands_a_call_on_is_passed_over",
    )


def test_package_with_a_loop_of_its_own_is_where_the_call_is(package):
    site = package["fit"](here)
    assert (site.file.rpartition("/")[2], site.function) == ("framework.py", "backward")


def test_links_to_packages_are_known_by_every_name(tmp_path):
    """A virtual environment or a home that is a link must not make torch's lines the user's."""
    script = tmp_path / "ask.py"
    script.write_text(
        "import os, sys, torch\n"
        "from nanguard.replay.tracer import sites\n"
        "real = os.path.realpath\n"
        "files = [torch.nn.__file__, sites.__file__, os.__file__]\n"
        "print([sites.is_users(name) for file in files for name in (file, real(file))])\n"
        "print(sites.is_users(sys.argv[0]), sites.is_users(real(sys.argv[0])))\n"
    )
    real = Path(torch.__file__).parents[1]
    (tmp_path / "linked").symlink_to(real)
    own = Path(nanguard.__file__).parents[1]
    (tmp_path / "ours").symlink_to(own)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path / 'ours'}{os.pathsep}{tmp_path / 'linked'}"}
    out = subprocess.run(
        [sys.executable, str(script), "x"], env=env, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert out == [str([False] * 6), "True True"]


def test_every_module_of_this_package_is_known_as_its_own():
    package = Path(nanguard.__file__).parent
    modules = [str(path) for path in package.rglob("*.py")]
    assert str(package / "run" / "live.py") in modules
    assert all(map(sites.is_ours, modules))
    assert not any(map(sites.is_users, modules))
