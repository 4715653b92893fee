"""The form of a run on Prefect's page: the ten fields people change first; all others stay behind "Use JSON input".

Prefect's page draws what stands in `properties`, with no way to fold it, but keeps values it does not draw, and its
server validates `patternProperties` as well. So the other fields go there: a wrong one is refused as before.
"""

from __future__ import annotations

import re
from typing import Any

FIRST = {
    "LifecycleConfig": ("project", "seed", "data", "base", "sft", "ppo", "evaluate"),
    "DataConfig": ("source", "max_conversations"),
    "SFTConfig": ("steps",),
    "PPOSection": ("stages",),
    "PPOStageConfig": ("iterations", "lr", "kl"),
    "KLConfig": ("coef",),
    "EvaluateSection": ("num_prompts",),
}
"""Section of the config → its fields in the form, in order."""
HINT = "These are the fields people change first. All others: the menu ⋮ → Use JSON input."


def with_first_fields(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a flow's parameters, with only FIRST in the `properties` of those sections."""
    sections = schema.get("definitions", {})
    folded = {name: _fold(section, FIRST[name]) if name in FIRST else section for name, section in sections.items()}
    if "LifecycleConfig" in folded:
        folded["LifecycleConfig"]["description"] = HINT
    return schema | {"definitions": folded}


def _fold(section: dict[str, Any], first: tuple[str, ...]) -> dict[str, Any]:
    fields = section["properties"]
    shown = {name: fields[name] | {"title": name, "position": place} for place, name in enumerate(first)}
    others = {f"^{re.escape(name)}$": field for name, field in fields.items() if name not in first}
    return section | {"properties": shown, "patternProperties": others}
