"""What is shipped: versions that agree, extras that are complete, scripts that a shell can read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import nanguard

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_is_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == nanguard.__version__
    assert f'"{nanguard.__version__}"' in (ROOT / "packaging/conda.yaml").read_text()


def test_all_is_every_extra_for_users():
    extras = PROJECT["optional-dependencies"]
    (all_of_them,) = extras["all"]
    named = set(re.fullmatch(r"nanguard\[(.*)\]", all_of_them)[1].split(","))
    others = {"all", "dev", "dev-remote", "docs", "ray"}
    assert named == set(extras) - others


def test_conda_needs_what_pip_needs():
    recipe = (ROOT / "packaging/conda.yaml").read_text()
    for dependency in PROJECT["dependencies"]:
        name, bound = re.match(r"([a-z]+)(>=[0-9.]+)", dependency).groups()
        assert f"    - {name} {bound}" in recipe


def test_the_smoke_test_is_a_script():
    script = ROOT / "packaging/smoke.sh"
    assert script.stat().st_mode & 0o111
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["pyproject.toml", "README.md", "LICENSE", "src"])
def test_the_image_is_built_from_what_is_there(name: str):
    assert (ROOT / name).exists()
    assert f"!{name}" in (ROOT / ".dockerignore").read_text().splitlines()
