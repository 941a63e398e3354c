"""Memory and load of this machine's GPUs, where NVML is there."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

# Seconds between two looks; a look takes some time of the driver.
_EVERY = 2.0
_MOST = 16
_GIB = float(1 << 30)


class Gpus:
    """The GPUs of this machine; none where NVML is not installed or finds no driver."""

    def __init__(self) -> None:
        self._nvml = _nvml()
        self._next = 0.0
        self._told: list[str] = []

    def told(self) -> list[str]:
        """Returns a line for each GPU."""
        if self._nvml is not None and time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY
            self._told = self._look(self._nvml)
        return self._told

    def _look(self, nvml: Any) -> list[str]:
        told: list[str] = []
        try:
            for index in range(min(_MOST, nvml.nvmlDeviceGetCount())):
                device = nvml.nvmlDeviceGetHandleByIndex(index)
                memory = nvml.nvmlDeviceGetMemoryInfo(device)
                load = nvml.nvmlDeviceGetUtilizationRates(device).gpu
                used, total = memory.used / _GIB, memory.total / _GIB
                told.append(f"GPU {index}  {used:.1f} of {total:.0f} GiB  {load} %")
        except nvml.NVMLError:
            return told
        return told


def _nvml() -> Any:
    try:
        pynvml = import_module("pynvml")
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
