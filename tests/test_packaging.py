"""What is shipped: versions that agree, extras that are complete, scripts that a shell can read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

import nanguard
from nanguard.cli.entry import run

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, BUILD = SETTINGS["project"], SETTINGS["build-system"]


def recipe() -> dict[str, Any]:
    """Returns the recipe as conda reads it, once its few variables are filled in."""
    lines = (ROOT / "packaging/conda.yaml").read_text().splitlines()
    (version,) = (re.search(r'"([0-9.]+)"', line)[1] for line in lines if line.startswith("{%"))
    text = "\n".join(line for line in lines if not line.startswith("{%"))
    return yaml.safe_load(text.replace("{{ version }}", version).replace("{{ PYTHON }}", "python"))


def test_the_version_is_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == nanguard.__version__
    assert str(recipe()["package"]["version"]) == nanguard.__version__
    git = ["git", "-C", str(ROOT), "tag", "--points-at", "HEAD"]
    tags = subprocess.run(git, capture_output=True, text=True, check=False).stdout.split()
    assert set(tags) <= {f"v{nanguard.__version__}"}


def test_all_is_every_extra_for_users():
    extras = PROJECT["optional-dependencies"]
    (all_of_them,) = extras["all"]
    named = set(re.fullmatch(r"nanguard\[(.*)\]", all_of_them)[1].split(","))
    others = {"all", "dev", "dev-remote", "docs", "ray"}
    assert named == set(extras) - others


def bounded(dependencies: list[str]) -> set[tuple[str, str]]:
    """Returns the name and the lowest version of each; what has none is left out."""
    found = (re.match(r"([a-z]+) ?>=([0-9.]+)", dependency) for dependency in dependencies)
    return {match.groups() for match in found if match}


def test_conda_needs_what_pip_needs():
    needs = recipe()["requirements"]
    lowest = ("python", PROJECT["requires-python"].removeprefix(">="))
    assert bounded(needs["run"]) == bounded(PROJECT["dependencies"]) | {lowest}
    assert bounded(needs["host"]) == bounded(BUILD["requires"]) | {lowest}
    torch = PROJECT["optional-dependencies"]["torch"][0].removeprefix("torch>=")
    assert needs["run_constrained"] == [f"pytorch >={torch}"]


def test_conda_builds_and_tries_what_there_is():
    read = recipe()
    made = dict(line.split(" = ") for line in read["build"]["entry_points"])
    assert made == PROJECT["scripts"]
    assert read["about"]["license"] == PROJECT["license"]
    assert (ROOT / read["about"]["license_file"]).is_file()
    for command in read["test"]["commands"]:
        program, *words = command.split()
        assert (program, run(words)) == ("nanguard", 0)


def test_the_smoke_test_is_a_script():
    script = ROOT / "packaging/smoke.sh"
    assert script.stat().st_mode & 0o111
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_image_is_built_from_what_is_there():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    seen = (ROOT / ".dockerignore").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    assert copied
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in seen
    # What the build needs of the project lies in the image.
    assert {PROJECT["readme"], *PROJECT["license-files"]} <= set(copied)
    (named,) = re.findall(r'"\.\[\$\{EXTRA\}(.*)\]"', "\n".join(lines))
    assert set(named.split(",")) <= set(PROJECT["optional-dependencies"])
    assert f'ENTRYPOINT ["{next(iter(PROJECT["scripts"]))}"]' in lines
