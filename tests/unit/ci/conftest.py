"""The scripts of `.ci/`, which are not in a package."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def load_script() -> Callable[..., Any]:
    """A function that imports `.ci/NAME.py` of this checkout, or of another."""

    def load(name: str, root: Path = ROOT) -> Any:
        spec = importlib.util.spec_from_file_location(name, root / ".ci" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
