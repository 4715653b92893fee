"""What the training stages are given in tests of their loops."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.methods.ppo.loop import make_inputs
from tests.unit.methods.training.preference_loop import make_root
from xray_runtime.methods.ppo.kind import PPOInputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> PPOInputs:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_root(tmp_path)
