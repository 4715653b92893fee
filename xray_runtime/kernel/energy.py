"""The energy that this machine's processors and GPUs say they used: RAPL's and NVML's counters.

RAPL counts in /sys/class/powercap, which often only root may read; its counters begin again after some minutes of work.
NVML is NVIDIA's driver library. Both count everything that runs on the machine.
"""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import NamedTuple

POWERCAP = Path("/sys/class/powercap")
NVML = "libnvidia-ml.so.1"
EVERY_S = 20.0
"""More often than a counter of RAPL begins again."""


class Counter(NamedTuple):
    joules: float
    wraps_at: float = 0.0
    """The counter begins again there; 0: never."""


def counters() -> dict[str, Counter]:
    """The counters that can be read, by name: `processor-N`, `gpu-N`."""
    return _processors() | _gpus()


class EnergyMeter:
    """Measures from when it is made, in a thread of its own where there is something to measure."""

    def __init__(self) -> None:
        self._last, self._used, self._lock = counters(), dict[str, float](), threading.Lock()
        self._ended = threading.Event()
        if self._last:
            threading.Thread(target=self._run, name="energy", daemon=True).start()

    def joules(self) -> dict[str, float]:
        """Joules since it was made, by counter; empty where the machine does not tell."""
        with self._lock:
            for name, now in counters().items():
                if name in self._last:
                    difference = now.joules - self._last[name].joules
                    wrapped = difference + now.wraps_at
                    self._used[name] = self._used.get(name, 0.0) + (difference if difference >= 0 else wrapped)
                self._last[name] = now
            return dict(self._used)

    def end(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(EVERY_S):
            self.joules()


def _processors() -> dict[str, Counter]:
    found = {}
    for zone in sorted(POWERCAP.glob("intel-rapl:*")):
        try:
            # Zones below a processor's are parts of it, and others count it again.
            if (zone / "name").read_text().startswith("package"):
                used, most = (int((zone / name).read_text()) / 1e6 for name in ("energy_uj", "max_energy_range_uj"))
                found[f"processor-{zone.name.partition(':')[2]}"] = Counter(used, most)
        except (OSError, ValueError):
            continue
    return found


def _gpus() -> dict[str, Counter]:
    try:
        nvml = ctypes.CDLL(NVML)
        count = ctypes.c_uint()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return {}
        found = {}
        for number in range(count.value):
            device, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
            if not nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device)) and not (
                nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(millijoules))
            ):
                found[f"gpu-{number}"] = Counter(millijoules.value / 1e3)
        return found
    # No library, or one that is too old.
    except (OSError, AttributeError):
        return {}
