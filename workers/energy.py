"""The energy that a GPU has taken, where NVIDIA's management library tells it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

_MILLIJOULES = 1000.0


class EnergyMeter(Collector):
    """`precis_energy_joules_total` of one device since this process started; nothing where it cannot be told."""

    def __init__(self, index: int, library: str = "libnvidia-ml.so.1") -> None:
        """`index` is the device's; `library` NVIDIA's."""
        self._device = ctypes.c_void_p()
        try:
            self._nvml = ctypes.CDLL(library)
            failed = self._nvml.nvmlInit_v2() or self._nvml.nvmlDeviceGetHandleByIndex_v2(
                ctypes.c_uint(index), ctypes.byref(self._device)
            )
        except (OSError, AttributeError):
            failed = True
        self._failed = bool(failed)
        self._began = self._read() or 0.0

    def _read(self) -> float | None:
        """Joules since the driver was loaded."""
        taken = ctypes.c_ulonglong()
        if self._failed or self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(taken)):
            return None
        return taken.value / _MILLIJOULES

    def collect(self) -> Iterator[CounterMetricFamily]:
        """As prometheus_client asks for it."""
        if (now := self._read()) is not None:
            text = "Energy that the GPU took since the worker started."
            yield CounterMetricFamily("precis_energy_joules", text, value=now - self._began)
