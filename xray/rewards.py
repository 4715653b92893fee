"""Sources of reward, and the verifiers' checks, for your own rewards. Imports no torch."""

from __future__ import annotations

from xray_runtime.graph.handles import RewardSource, Weighted, reward
from xray_runtime.rewards.checks import json_schema, last_block, math, regex

__all__ = ["RewardSource", "Weighted", "json_schema", "last_block", "math", "regex", "reward"]
