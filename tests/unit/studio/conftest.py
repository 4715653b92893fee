"""An output directory with all that the studio shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.studio.world import compared, recorded, with_rollouts
from tests.unit.trust.synthetic import Lifecycle


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole lifecycle with rollouts, comparisons and recorded answers."""
    output = tmp_path_factory.mktemp("studio") / "run"
    Lifecycle(output).whole()
    with_rollouts(output, tmp_path_factory.mktemp("tokenizer"))
    compared(output)
    recorded(output)
    return output
