"""A graph that records its calls."""

from __future__ import annotations

from typing import Any

import pytest

from xray_runtime.kernel.graph.graph import recording


@pytest.fixture
def graph() -> Any:
    with recording(seed=3) as graph:
        yield graph
