"""Names of a running function are read without keeping what it lets go of."""

from __future__ import annotations

import sys
import weakref

import pytest

from nanguard.replay.frames import let_go, names_of


class Output:
    pass


def look() -> None:
    """Does what is done at the beginning of each step."""
    frame = sys._getframe(1)
    local = frame.f_locals
    assert "output" in local
    let_go(frame, local)


def test_what_the_function_lets_go_of_is_gone():
    output = Output()
    first = weakref.ref(output)
    look()
    names_of(sys._getframe())
    output = Output()
    assert first() is None
    assert output is not None


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="names are not copied there")
def test_without_letting_go_it_would_stay():
    output = Output()
    first = weakref.ref(output)
    assert sys._getframe().f_locals["output"] is output
    output = Output()
    assert first() is not None


def test_names_that_the_script_itself_has_asked_for_stay():
    output, lr = Output(), 0.1
    settings = locals()
    look()
    assert settings["output"] is output
    assert settings["lr"] == lr


def test_names_of_a_module_stay():
    space = {"sys": sys, "let_go": let_go}
    exec("frame = sys._getframe(); kept = 1; let_go(frame, frame.f_locals)", space)
    assert space["kept"] == 1
