"""A shipped stage kind is one folder in `xray_runtime/methods`; no other file lists it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import xray
import xray_runtime.methods
from xray_runtime.kernel.graph import kind, kinds
from xray_runtime.kernel.graph.graph import Graph
from xray_runtime.kernel.graph.stage_identity import declarations

FOLDER = {
    "__init__.py": "",
    "config.py": """
from xray_runtime.kernel.config.section import Section

class LongestConfig(Section):
    max_rows: int = 8
    '''The number of rows that stay.'''
""",
    "kind.py": """
from dataclasses import dataclass

from xray_runtime.kernel.graph.artifacts import Dataset
from xray_runtime.kernel.graph.kind import StageKind, register
from xray_runtime.methods.longest.config import LongestConfig

@dataclass(frozen=True)
class LongestInputs:
    data: Dataset

LONGEST = register(
    StageKind("longest", LongestConfig, LongestInputs, Dataset, "xray_runtime.methods.longest.body:run", computes=False)
)
""",
    "body.py": """
def run(stage, out, recorder):
    return stage.config.max_rows
""",
}


@pytest.fixture
def _longest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder, beside those of `xray_runtime.methods`."""
    for name, text in FOLDER.items():
        (tmp_path / "longest").mkdir(exist_ok=True)
        (tmp_path / "longest" / name).write_text(text)
    monkeypatch.setattr(xray_runtime.methods, "__path__", [*xray_runtime.methods.__path__, str(tmp_path)])
    importlib.invalidate_caches()
    kinds._import_methods.cache_clear()
    yield
    kind.KINDS.pop("longest", None)
    for name in [name for name in sys.modules if name.startswith("xray_runtime.methods.longest")]:
        del sys.modules[name]
    kinds._import_methods.cache_clear()


@pytest.mark.usefixtures("_longest")
def test_a_folder_of_methods_is_a_stage_kind(load_script: Callable[..., Any]) -> None:
    with Graph() as graph:
        data = xray.prepare(source="chitchat")
        xray.longest(data, max_rows=3)
    call = graph.calls["longest"]
    assert (call.config_json(), call.parents) == ({"max_rows": 3}, {"data": data})
    assert call.kind in kinds.shipped()
    assert "xray_runtime.methods.longest.kind" in declarations()
    assert call.kind.run(call, None, None) == 3
    assert "def longest(" in load_script("stubs").stub()
    assert "longest" in dir(xray)
