"""What the tests of the engine share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.check.plugin import install

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an installed package that brings rules."""
    return install(tmp_path_factory.mktemp("site"))
