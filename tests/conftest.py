"""What holds for all tests."""

import gc
import itertools
import os
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from tests.message_texts import Messages
from xray_runtime.kernel.processes import without_collection

# No test asserts a wall time.
# Explaining a failure traces it, and CPython 3.11 can loop without end in `sys.settrace`.
settings.register_profile(
    "xray",
    deadline=None,
    phases=[phase for phase in Phase if phase is not Phase.explain],
    max_examples=int(os.environ.get("XRAY_TEST_EXAMPLES", "30")),
)
settings.load_profile("xray")


NUMBERS = itertools.count()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The garbage collector would take a third of a collection's time, and go on looking at a million objects of
    libraries and parameters that stay."""
    with without_collection():
        result = yield
    gc.collect()
    gc.freeze()
    return result


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pytest's own finds its number by listing the directories of all tests before, which thousands of tests feel."""
    path = tmp_path_factory.getbasetemp() / f"{request.function.__name__[:30]}_{next(NUMBERS)}"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow keeps the address it was last given in the environment, where the next test would find it."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def message_texts(request: pytest.FixtureRequest, tmp_path: Path) -> Messages:
    """Compares messages with their texts in tests/messages."""
    return Messages(request.path, request.node.name, tmp_path)
