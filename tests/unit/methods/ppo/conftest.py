"""What a PPO stage is given in tests of its loop."""

from __future__ import annotations

import pytest

from tests.unit.methods.ppo.loop import make_inputs
from xray_runtime.methods.ppo.kind import PPOInputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> PPOInputs:
    return make_inputs(tmp_path_factory.mktemp("inputs"))
