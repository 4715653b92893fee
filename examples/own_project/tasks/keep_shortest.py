"""A stage kind of one's own: keep the pairs with the shortest replies, as SFT data.

This file is all there is to it. The body gets typed config and inputs, a directory and a recorder; caching, resume,
lineage, audit and pages come from X-ray.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

import xray
from xray.data import HELDOUT, TRAIN, Example, Pairs, write_pairs


class KeepShortestConfig(xray.Section):
    """What `keep_shortest` reads."""

    share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Share of the training pairs to keep."""


@dataclass(frozen=True)
class KeepShortestInputs:
    data: xray.Dataset


@xray.stage_kind("keep_shortest", config=KeepShortestConfig, inputs=KeepShortestInputs, output=xray.Dataset)
def keep_shortest(stage: xray.Stage[KeepShortestConfig, KeepShortestInputs], out: Path, recorder: xray.Recorder) -> int:
    """Writes the training pairs with the shortest replies; held-out pairs stay as they are."""
    source = stage.inputs.data.path
    pairs = Pairs(source / TRAIN, Example)
    kept = sorted(pairs, key=lambda pair: len(pair.response))[: max(1, round(stage.config.share * len(pairs)))]
    write_pairs(out / TRAIN, Example, kept)
    for name in (HELDOUT, "dataset.json", "stats.json"):
        (out / name).write_bytes((source / name).read_bytes())
    recorder.metrics({"keep_shortest/pairs": float(len(kept))}, step=0)
    recorder.progress(len(kept), len(kept), "pairs", "kept")
    return 0
