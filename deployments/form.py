"""The form of a run on Prefect's page: the fields people change first; all others are behind "Use JSON input".

Prefect's page shows every field in `properties`, but its server also validates `patternProperties`. So the other fields
move there: the page keeps their values, and wrong ones are still refused.
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
HINT = "The fields people change first. For all others: the menu ⋮ → Use JSON input."


def with_first_fields(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a flow's parameters with only the fields of FIRST in `properties`."""
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
