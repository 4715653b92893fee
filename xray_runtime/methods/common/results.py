"""Results: their files (numbers, prompts and samples), and the names of their metrics."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xray_runtime.kernel.graph.kind import Recorder


MAX_NAME = 150
"""Characters of a reward source's name in metrics; MLflow allows 250 for the whole."""


def metric_name(source: str) -> str:
    """A reward source's name in metrics, without the characters that MLflow does not allow, and not too long for it."""
    name = re.sub(r"[^\w. -]", ".", source)
    if len(name) <= MAX_NAME:
        return name
    return f"{name[:MAX_NAME]}.{hashlib.sha256(source.encode()).hexdigest()[:8]}"


def write_json(path: Path, content: object) -> None:
    """Write content sorted by name; in UTF-8 in every locale, so that a checkpoint has the same bytes everywhere."""
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False)
    # Names of columns may hold a lone surrogate.
    path.write_text(text + "\n", encoding="utf-8", errors="surrogatepass")


def write_results(
    out: Path,
    recorder: Recorder,
    file: str,
    content: Mapping[str, Any],
    prompts: Sequence[str],
    samples: Sequence[Mapping[str, Any]],
) -> None:
    """Write `content` into `file`, all prompts (for the check that none was trained on) and a few readable rows."""
    write_json(out / file, content)
    for name, value, indent in (("prompts.json", prompts, 1), ("samples.json", samples, 2)):
        (out / name).write_text(json.dumps(value, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")
    if samples:
        recorder.table("samples", list(samples[0]), [list(sample.values()) for sample in samples])


def plain_numbers(content: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """The metrics `prefix`/NAME of the plain numbers in `content`."""
    return {f"{prefix}/{name}": float(value) for name, value in content.items() if isinstance(value, int | float)}
