"""An output directory with all that the studio shows; copies of the lifecycle that tests of trust have."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.studio.world import compared, recorded, with_rollouts
from tests.unit.trust.conftest import fresh as fresh, untouched as untouched
from tests.unit.trust.synthetic import copied


@pytest.fixture(scope="module")
def made(untouched: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole lifecycle with rollouts, comparisons and recorded answers."""
    output = copied(untouched, tmp_path_factory.mktemp("studio") / "run")
    with_rollouts(output, tmp_path_factory.mktemp("tokenizer"))
    compared(output)
    recorded(output)
    return output
