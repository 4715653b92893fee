"""Refuse training data that is held for a person."""

from __future__ import annotations

import json
from pathlib import Path


def refuse_held(stage: str, curated: Path) -> None:
    """Raises ValueError if a checkpoint of `curate` is held; human verdicts from elsewhere never are."""
    path = curated / "stats.json"
    held = json.loads(path.read_text(encoding="utf-8")).get("held") if path.exists() else None
    if held:
        raise ValueError(
            f"{stage}: {curated.name} is held for a person: {'; '.join(held)}; look at it, then release it "
            "with the field `released`"
        )
