"""Fixtures that hold for every test."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

# Tests run beside each other, and so do the processes they start: threads would only wait for
# threads. It has to be known before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch.optim import optimizer as torch_optimizer

if TYPE_CHECKING:
    from collections.abc import Iterator

torch.set_num_threads(1)
# A busy machine takes longer for an example, which says nothing about it.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what is one of many alike, unless each of them is asked for."""
    if os.environ.get("NANGUARD_TESTS") == "exhaustive":
        return
    for item in items:
        if item.get_closest_marker("exhaustive") is not None:
            item.add_marker(pytest.mark.skip(reason="make test-exhaustive runs it"))


@pytest.fixture(autouse=True)
def no_parser_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps repairs of configurations from asking the libraries that read them.

    To import one takes ten seconds, and tests of their own ask them.
    """
    monkeypatch.setattr("nanguard.check.family_parsers.installed", lambda family: False)


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fails a test that leaves a patch or a global hook in torch."""
    backward = torch.Tensor.backward
    yield
    assert torch.Tensor.backward is backward
    assert not torch_optimizer._global_optimizer_post_hooks
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks
