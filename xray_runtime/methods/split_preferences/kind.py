"""Declaration of the stage kind `split_preferences`."""

from __future__ import annotations

from dataclasses import dataclass

from xray_runtime.kernel.graph.artifacts import Preferences
from xray_runtime.kernel.graph.kind import StageKind, register
from xray_runtime.methods.preferences.config import SplitPreferencesConfig


@dataclass(frozen=True)
class SplitPreferencesInputs:
    preferences: Preferences


SPLIT_PREFERENCES = register(
    StageKind(
        "split_preferences",
        SplitPreferencesConfig,
        SplitPreferencesInputs,
        Preferences,
        "xray_runtime.methods.split_preferences.body:run",
        computes=False,
        results="stats.json",
    )
)
