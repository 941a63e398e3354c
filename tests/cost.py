"""What something costs, in the time of this process: a busy machine makes no difference to it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def cpu_seconds(call: Callable[[], object]) -> float:
    """Returns how much of the processor a call takes."""
    begin = time.process_time()
    call()
    return time.process_time() - begin
