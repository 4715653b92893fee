from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.agents.parts import World, make_tokenizer, opened


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands and directories of tests."""
    monkeypatch.setenv("XRAY_ALLOWED_COMMANDS", "*")
    monkeypatch.setenv("XRAY_ALLOWED_PATHS", "/*")


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture
def world(tokenizer: Any) -> Iterator[World]:
    with opened(tokenizer) as found:
        yield found
