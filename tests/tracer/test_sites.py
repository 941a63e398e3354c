"""Where in the user's code something happens."""

from __future__ import annotations

import pytest

from nanguard.tracer import sites
from nanguard.tracer.sites import here

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
