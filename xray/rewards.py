"""Sources of reward, the verifiers' checks for your own functions, and the base classes of a kind of reward. Imports no
torch."""

from __future__ import annotations

from xray_runtime.kernel.graph.handles import RewardSource, Weighted, reward
from xray_runtime.rewards.checks import json_schema, last_block, math, regex
from xray_runtime.rewards.kind import ExternalTerm, ModelTerm
from xray_runtime.rewards.source import Batch, Score, Source, failure
from xray_runtime.rewards.term import Recording

__all__ = [
    "Batch",
    "ExternalTerm",
    "ModelTerm",
    "Recording",
    "RewardSource",
    "Score",
    "Source",
    "Weighted",
    "failure",
    "json_schema",
    "last_block",
    "math",
    "regex",
    "reward",
]
