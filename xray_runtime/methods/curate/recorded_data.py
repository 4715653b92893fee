"""Datasets from recorded feedback: pairs and demonstrations that `curate` made, and recorded prompts to evaluate on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xray_runtime.data.dropped import DroppedRows
from xray_runtime.data.heldout import held_out_prompts, is_held_out, refuse_held
from xray_runtime.data.pairs import (
    HELDOUT,
    TRAIN,
    Example,
    Pairs,
    PreferenceExample,
    pairs_of,
    prompt_text,
    write_pairs,
)
from xray_runtime.data.text_set import TextSet
from xray_runtime.kernel.graph.artifacts import ANSWERS, DEMONSTRATIONS, HELDOUT_OF, JUDGED_PAIRS
from xray_runtime.methods.common.results import write_json
from xray_runtime.methods.curate.curation import CONVERSATIONS, within_share
from xray_runtime.methods.curate.signals import conversation_of

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.kernel.config.section import Section
    from xray_runtime.kernel.graph.kind import Recorder
    from xray_runtime.methods.curate.config import RecordedPromptsConfig
    from xray_runtime.methods.curate.kind import DemonstrationsInputs, RecordedPromptsInputs
    from xray_runtime.methods.preferences.kind import PreferencesInputs


def curated_pairs(
    stage: Stage[Any, PreferencesInputs], dropped: DroppedRows
) -> Iterator[tuple[bool, PreferenceExample]]:
    """(whether it is held out, pair) of `curate`, without the prompts that `data` holds out. Raises ValueError if a
    person holds them."""
    assert stage.inputs.judgements is not None
    source, data = stage.inputs.judgements.path, stage.inputs.data
    refuse_held(stage.name, source)
    fixed = held_out_prompts(data.path) if data is not None else TextSet()
    for held_out, name in ((False, JUDGED_PAIRS), (True, HELDOUT_OF.format(JUDGED_PAIRS))):
        for pair in Pairs(source / name, PreferenceExample):
            if prompt_text(pair.prompt) in fixed:
                dropped.add("prompt_held_out", {"id": pair.id})
            else:
                yield held_out, pair


def demonstrations(stage: Stage[Section, DemonstrationsInputs], out: Path, recorder: Recorder) -> int:
    """Writes the corrections as a dataset: train.arrow, heldout.arrow, dataset.json, stats.json.

    Raises:
        ValueError: a person holds them, or one side is empty.
    """
    source = stage.inputs.curated.path
    refuse_held(stage.name, source)
    sides = {TRAIN: DEMONSTRATIONS, HELDOUT: HELDOUT_OF.format(DEMONSTRATIONS)}
    counts = {side: write_pairs(out / side, Example, Pairs(source / name, Example)) for side, name in sides.items()}
    if not all(counts.values()):
        raise ValueError(
            f"{stage.name}: {counts[TRAIN]} training and {counts[HELDOUT]} held-out corrections; both must be at least "
            "1: wait for more, or change heldout_fraction"
        )
    return _describe(out, recorder, {"train_pairs": counts[TRAIN], "heldout_pairs": counts[HELDOUT]})


def prompts(stage: Stage[RecordedPromptsConfig, RecordedPromptsInputs], out: Path, recorder: Recorder) -> int:
    """Writes heldout.arrow: each recorded prompt once whose conversation `curate` holds out, no more of one person than
    their share; train.arrow is empty."""
    seen = TextSet(text for one in stage.inputs.seen for text in pairs_of(one.path / TRAIN).prompt_texts())
    read, examples, askers = 0, dict[str, Example](), dict[str, str]()
    for feedback in stage.inputs.feedback:
        with (feedback.path / ANSWERS).open(encoding="utf-8") as lines:
            for row in map(json.loads, lines):
                read += 1
                text, conversation = prompt_text(row["prompt"]), conversation_of(row["prompt"])
                if is_held_out(stage.seed, CONVERSATIONS, conversation, stage.config.heldout_fraction):
                    examples.setdefault(text, Example(row["id"], conversation, row["prompt"], row["reply"]))
                    askers[row["id"]] = row["asker"]
    fresh = [example for text, example in examples.items() if text not in seen]
    most = stage.config.max_share
    kept = fresh if most is None else within_share(fresh, most, lambda example: (askers[example.id],))
    write_pairs(out / TRAIN, Example, [])
    write_pairs(out / HELDOUT, Example, kept)
    counts = {"read_answers": read, "train_pairs": 0, "heldout_pairs": len(kept)}
    counts |= {"dropped_seen_in_training": len(examples) - len(fresh)}
    return _describe(out, recorder, counts | {"dropped_over_a_persons_share": len(fresh) - len(kept)})


def _describe(out: Path, recorder: Recorder, counts: dict[str, int]) -> int:
    (out / "dataset.json").write_text(json.dumps({"max_prompt_tokens": None}) + "\n")
    write_json(out / "stats.json", counts)
    recorder.metrics({f"data/{name}": float(count) for name, count in counts.items()}, step=0)
    pairs = counts["train_pairs"] + counts["heldout_pairs"]
    recorder.progress(pairs, pairs, "rows", "written")
    return 0
