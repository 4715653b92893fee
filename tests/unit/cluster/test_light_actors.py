"""A cluster has an actor for each device, and most of them wait: what they import counts that many times."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

HEAVY = ("torch", "transformers", "vllm", "mlflow", "prefect", "pyarrow", "tokenizers", "pandas", "scipy")


@pytest.mark.parametrize("module", ["workhorse", "whole_model", "pool.reservations"])
def test_an_actor_imports_nothing_heavy_before_it_has_a_model(module: str) -> None:
    code = f"import sys, xray_runtime.cluster.{module}; print(*(set({HEAVY}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
