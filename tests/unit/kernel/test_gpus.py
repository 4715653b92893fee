"""Signs that a machine has NVIDIA's driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from xray_runtime.kernel.gpus import has_driver


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("proc/driver/nvidia/version", True),
        ("dev/nvidia0", True),
        # WSL 2 has this one alone.
        ("dev/dxg", True),
        ("dev/nvidiactl", False),
        ("dev/null", False),
    ],
)
def test_a_driver_shows_by_its_files(file: str, expected: bool, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).touch()
    assert has_driver(tmp_path) == expected
