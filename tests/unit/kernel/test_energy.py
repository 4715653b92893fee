"""Energy by counters of a machine that the test makes up: files as RAPL's, a library as NVML."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from xray_runtime.kernel import energy
from xray_runtime.kernel.energy import EnergyMeter, counters

LIBRARY = """
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned number, void **device) { *device = (void *)(long)(number + 1); return 0; }
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules) {
    if ((long)device == 2) return 3;
    *millijoules = 7000000000000ULL;
    return 0;
}
"""


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without counters."""
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    monkeypatch.setattr(energy, "NVML", str(tmp_path / "libnvidia-ml.so.1"))
    return tmp_path


def processor(machine: Path, zone: str, name: str, microjoules: int) -> None:
    (machine / zone).mkdir(exist_ok=True)
    for file, content in (("name", name), ("energy_uj", microjoules), ("max_energy_range_uj", 1_000_000_000)):
        (machine / zone / file).write_text(f"{content}\n")


def test_a_machine_that_tells_nothing(machine: Path) -> None:
    assert EnergyMeter().joules() == {}


def test_processors_are_counted_once_and_past_the_end_of_their_counter(machine: Path) -> None:
    processor(machine, "intel-rapl:0", "package-0", 990_000_000)
    processor(machine, "intel-rapl:0:0", "core", 5_000_000)
    processor(machine, "intel-rapl:1", "psys", 5_000_000)
    meter = EnergyMeter()
    processor(machine, "intel-rapl:0", "package-0", 995_000_000)
    assert meter.joules() == {"processor-0": 5.0}
    # 5 J to the end of the counter, and 3 J more.
    processor(machine, "intel-rapl:0", "package-0", 3_000_000)
    assert meter.joules() == {"processor-0": 13.0}
    (machine / "intel-rapl:0" / "energy_uj").unlink()
    assert meter.joules() == {"processor-0": 13.0}
    meter.end()


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_gpus_that_count_are_read(machine: Path) -> None:
    (machine / "nvml.c").write_text(LIBRARY)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", energy.NVML, machine / "nvml.c"], check=True)
    # The second has no counter.
    assert counters() == {"gpu-0": (7e9, 0.0)}
