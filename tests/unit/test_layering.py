"""Who may import whom: xray → deployments → flows → tasks → xray_runtime, never back."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def imported(path: Path) -> Iterator[str]:
    """Top-level names of every absolute import in a file, also those inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


FORBIDDEN = {
    "xray_runtime": {"prefect", "prefect_ray", "xray", "flows", "tasks", "deployments"},
    "tasks": {"xray.flows", "xray.deployments", "xray.cli", "flows", "tasks", "deployments"},
    "flows": {"xray.deployments", "xray.cli", "flows", "tasks", "deployments"},
    "deployments": {"xray.cli", "flows", "tasks", "deployments"},
    "xray_runtime/algorithms": {
        "ray",
        "deepspeed",
        "megatron",
        "vllm",
        "transformers",
        "mlflow",
        "numpy",
        "pathlib",
        "os",
    },
    "xray_runtime/planning": {"ray", "deepspeed", "megatron", "vllm", "mlflow"},
    "xray_runtime/store": {"torch", "ray", "mlflow", "vllm", "deepspeed", "megatron", "transformers"},
}

OWNERS = {
    "mlflow": {"xray_runtime/lineage", "xray_runtime/tracking", "deployments/local_services.py"},
    "vllm": {
        "xray_runtime/engines/generation/vllm.py",
        "xray_runtime/engines/offload.py",
        "xray_runtime/engines/generation/vllm_server.py",
        "xray_runtime/weights/vllm_transfer.py",
        "xray_runtime/weights/device_transfer.py",
    },
    "deepspeed": {
        "xray_runtime/engines/training/zero.py",
        "xray_runtime/engines/training/tensor.py",
        "xray_runtime/engines/generation/deepspeed_inference.py",
    },
    "megatron": {"xray_runtime/engines/training/megatron/"},
    "fsspec": {"xray_runtime/store/shared.py"},
    "peft": {"xray_runtime/models/adapters.py"},
}
"""Heavy library → the only places that import it."""


@pytest.mark.parametrize(("folder", "names"), FORBIDDEN.items())
def test_nothing_is_imported_against_the_layers(folder: str, names: set[str]) -> None:
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    found = [
        (f.name, name) for f in files for name in imported(f) if any(f"{name}.".startswith(f"{top}.") for top in names)
    ]
    assert found == []


@pytest.mark.parametrize(("library", "owners"), OWNERS.items())
def test_heavy_libraries_have_one_owner(library: str, owners: set[str]) -> None:
    importers = {
        path.relative_to(ROOT).as_posix()
        for folder in ("xray/cli", "deployments", "flows", "tasks", "xray_runtime")
        for path in (ROOT / folder).rglob("*.py")
        if any(name.split(".")[0] == library for name in imported(path))
    }
    assert importers
    assert all(any(place.startswith(owner) for owner in owners) for place in importers), importers


def test_the_command_imports_no_heavy_library() -> None:
    """It answers at once; and what Ray is told in the environment is read when Ray is imported."""
    code = "import sys, xray.cli.main; print(*({'mlflow', 'prefect', 'ray', 'torch', 'vllm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
