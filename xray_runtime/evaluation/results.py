"""The files of an evaluation or a benchmark."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xray_runtime.graph.kind import Recorder


def write_results(
    out: Path,
    recorder: Recorder,
    file: str,
    content: Mapping[str, Any],
    prompts: Sequence[str],
    samples: Sequence[Mapping[str, Any]],
) -> None:
    """Write `content` into `file`, all prompts (for the check that none was trained on) and a few readable rows."""
    (out / file).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    (out / "prompts.json").write_text(json.dumps(prompts, indent=1, ensure_ascii=False) + "\n")
    (out / "samples.json").write_text(json.dumps(samples, indent=2, ensure_ascii=False) + "\n")
    if samples:
        recorder.table("samples", list(samples[0]), [list(sample.values()) for sample in samples])


def plain_numbers(content: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """The metrics `prefix`/NAME of the plain numbers in `content`."""
    return {f"{prefix}/{name}": float(value) for name, value in content.items() if isinstance(value, int | float)}
