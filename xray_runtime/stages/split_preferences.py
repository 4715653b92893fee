"""Declaration of the stage kind `split_preferences`."""

from __future__ import annotations

from xray_runtime.config.preferences import SplitPreferencesConfig
from xray_runtime.graph.artifacts import Preferences
from xray_runtime.graph.inputs import SplitPreferencesInputs
from xray_runtime.graph.kind import StageKind, register

SPLIT_PREFERENCES = register(
    StageKind(
        "split_preferences",
        SplitPreferencesConfig,
        SplitPreferencesInputs,
        Preferences,
        "xray_runtime.preparation.split_preferences:run",
        computes=False,
        results="stats.json",
    )
)
