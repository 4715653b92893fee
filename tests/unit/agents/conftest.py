from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.agents.parts import World, make_tokenizer, opened


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture
def world(tokenizer: Any) -> Iterator[World]:
    with opened(tokenizer) as found:
        yield found
