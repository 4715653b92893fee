"""Configs of quantized weights, which X-ray does not train; asked before a run as well, so without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def why_quantized(config: Mapping[str, Any]) -> str | None:
    """Why a `config.json` is refused, after "it"; None: its weights are plain."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    read = quantization.get if isinstance(quantization, Mapping) else quantization.to_dict().get
    return (
        f"is quantized ({read('quant_method') or 'quantization_config'}): convert it to bfloat16 first, or take the "
        "model it was made from"
    )


def check_plain(model: str, field: str) -> None:
    """Raises ValueError if `model` is a directory with quantized weights."""
    path = Path(model) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # whoever reads the model says so
        return
    reason = why_quantized(config) if isinstance(config, dict) else None
    if reason is not None:
        raise ValueError(f"{field}: {model!r} is not allowed: it {reason}")
