"""The context of a model, by its config."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
"""Config fields by which families name their context."""


def max_positions(directory: str | os.PathLike[str]) -> int | None:
    """The context of a checkpoint directory's model, in tokens; None where its config does not say."""
    path = Path(directory) / "config.json"
    return positions(json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {})


def positions(config: Mapping[str, Any]) -> int | None:
    """The context in a `config.json`, in tokens; None where it does not say."""
    # A model that also reads images keeps what its language model is in a section of its own.
    for section in (config, config.get("text_config") or {}):
        for name in CONTEXT:
            if isinstance(section.get(name), int) and section[name] > 0:
                return max(int(section[name]), _scaled_positions(section))
    return None


def _scaled_positions(config: Mapping[str, Any]) -> int:
    """The context to which a config scales rotary embeddings, where it names the one that it begins from (YaRN)."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    original, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
    if scaling.get("rope_type", scaling.get("type")) != "yarn":
        return 0
    return int(original * factor) if isinstance(original, int) and isinstance(factor, int | float) else 0
