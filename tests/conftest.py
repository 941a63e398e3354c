"""Fixtures that hold for every test."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

# Tests run beside each other, and so do the processes they start: threads would only wait for
# threads. It has to be known before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

if TYPE_CHECKING:
    from collections.abc import Iterator

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fails a test that leaves a patch or a global hook in torch."""
    backward = torch.Tensor.backward
    yield
    assert torch.Tensor.backward is backward
    assert not torch_optimizer._global_optimizer_post_hooks
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks
