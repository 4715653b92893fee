"""Libraries that a process need not import (`cluster.pool.libraries`, `generators.vllm.loading`)."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from xray_runtime.engines.generators.vllm.loading import _OwnModules
from xray_runtime.kernel.hidden_libraries import hidden


def test_a_hidden_library_is_as_if_not_installed_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hidden_here.py").write_text("NUMBER = 3\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with hidden("hidden_here"):
        with pytest.raises(ImportError):
            importlib.import_module("hidden_here")
        assert importlib.util.find_spec("hidden_here") is None
    assert importlib.import_module("hidden_here").NUMBER == 3
    # One that is imported stays.
    with hidden("hidden_here"):
        assert importlib.import_module("hidden_here").NUMBER == 3
    assert importlib.import_module("hidden_here").NUMBER == 3


def test_a_library_stays_hidden_where_it_was_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hidden_there", None)
    with hidden("hidden_there"):
        pass
    assert sys.modules["hidden_there"] is None


def test_vllm_searches_its_own_modules_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = ModuleType("vllm.of_a_test"), ModuleType("vllms")
    monkeypatch.setitem(sys.modules, "vllm.of_a_test", own)
    monkeypatch.setitem(sys.modules, "vllms", other)
    modules = _OwnModules().modules
    assert modules["vllm.of_a_test"] is own
    assert {name.split(".")[0] for name in modules} == {"vllm"}
