"""Stage `split_preferences`: one of two parts of preference pairs, no prompt in both.

A policy learns from one part, by a reward model or by DPO; a judging reward model learns from the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from xray_runtime.data.heldout import is_held_out
from xray_runtime.data.length_baseline import length_baseline_accuracy
from xray_runtime.data.pairs import HELDOUT, TRAIN, Pairs, PreferenceExample, prompt_text, write_pairs
from xray_runtime.data.pictures import FOLDER
from xray_runtime.data.reading.pictures import keep_pictures_of
from xray_runtime.methods.common.results import write_json

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.kernel.graph.kind import Recorder
    from xray_runtime.methods.preferences.config import SplitPreferencesConfig
    from xray_runtime.methods.split_preferences.kind import SplitPreferencesInputs

PURPOSE = "judge"
"""Seeds the split. It differs from the purpose of the held-out split, so that each part has both sides."""


def run(stage: Stage[SplitPreferencesConfig, SplitPreferencesInputs], out: Path, recorder: Recorder) -> int:
    """Writes train.arrow and heldout.arrow, each pair on its original side, and stats.json.

    Raises:
        ValueError: a side of the part would be empty.
    """
    config, source = stage.config, stage.inputs.preferences.path
    wanted = config.part == "heldout"
    counts = {}
    for side in (TRAIN, HELDOUT):
        pairs = Pairs(source / side, PreferenceExample)
        kept = (p for p in pairs if is_held_out(stage.seed, PURPOSE, prompt_text(p.prompt), config.heldout) == wanted)
        counts[side] = write_pairs(out / side, PreferenceExample, kept)
    keep_pictures_of(out / FOLDER, (out / TRAIN, out / HELDOUT), (source / FOLDER,))
    if not all(counts.values()):
        raise ValueError(
            f"{stage.name}: {counts[TRAIN]} training and {counts[HELDOUT]} held-out pairs; both must be at least 1: "
            "add pairs or change heldout"
        )
    stats = {"pairs": sum(counts.values()), "train_pairs": counts[TRAIN], "heldout_pairs": counts[HELDOUT]}
    written = [Pairs(out / side, PreferenceExample) for side in (TRAIN, HELDOUT)]
    numbers = stats | {"length_baseline_accuracy": length_baseline_accuracy(*written)}
    write_json(out / "stats.json", numbers)
    recorder.metrics({f"preferences/{name}": float(value) for name, value in numbers.items()}, step=0)
    recorder.progress(stats["pairs"], stats["pairs"], "pairs", f"kept for {config.part}")
    return 0
