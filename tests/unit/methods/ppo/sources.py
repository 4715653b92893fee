"""Sources of reward with functions and reward models of a test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from xray_runtime.cluster.stage import Stage
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.graph.artifacts import RewardModel
from xray_runtime.rewards.config import JudgingConfig
from xray_runtime.rewards.reward_sources import RewardSources
from xray_runtime.rewards.term import Term


def sources(
    *terms: Term, models: Sequence[Path] = (), kept: Path | None = None, max_failed: float = 0.5, **functions: Any
) -> RewardSources:
    config = JudgingConfig(rewards=list(terms), max_failed=max_failed)
    given = SimpleNamespace(rewards=[RewardModel(path) for path in models])
    return RewardSources(Stage("s", 0, config, given, RuntimeConfig(), None, functions, kept))  # type: ignore[arg-type]
