"""The sources of episodes, as methods find them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.graph.stage_identity import identify
from xray_runtime.kernel.store.digest_memory import DigestMemory
from xray_runtime.methods.common.environment import EPISODE_SOURCES
from xray_runtime.methods.evaluate.kind import EVALUATE

SOURCES = "xray_runtime.agents.sources."


@pytest.mark.parametrize(
    ("environment", "source"),
    [(None, []), ({"path": "json:JSONDecoder"}, ["environment"]), ({"url": "http://host"}, ["agent"])],
)
def test_a_key_digests_the_code_of_the_chosen_source_alone(
    environment: dict[str, Any] | None, source: list[str], tmp_path: Path
) -> None:
    config = EVALUATE.validated({"environment": environment, "max_new_tokens": 8})
    memory = DigestMemory(tmp_path / "memory")
    identity, _ = identify(EVALUATE, "evaluate", config, 0, RuntimeConfig(device="cpu"), {}, {}, memory)
    reached = {name for name in identity.code if name.startswith("xray_runtime.agents.")}
    assert [name.removeprefix(SOURCES) for name in sorted(reached) if name.startswith(SOURCES)] == source
    assert bool(reached) == bool(source)
    assert list(EPISODE_SOURCES) == ["agent", "environment"]
