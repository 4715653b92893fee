"""Stage `best_of_n`: people's replies replaced by the best of several samples, as data for SFT.

SFT on them is rejection sampling, and its iteration RAFT (Dong et al. 2023): policy gradients whose advantages are 1
for the reply that is kept and 0 for the others.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from xray_runtime.algorithms.groups import NONE, best_of, tied
from xray_runtime.data.pairs import HELDOUT, TRAIN, Example, prompt_text, write_pairs
from xray_runtime.data.pictures import FOLDER
from xray_runtime.data.reading.pictures import keep_pictures_of
from xray_runtime.data.reasoning import split_reasoning
from xray_runtime.data.tokenizing import decode_reply
from xray_runtime.methods.common.results import write_json
from xray_runtime.methods.common.sampling.episode_source import source_of
from xray_runtime.methods.common.sampling.sampled_groups import Groups, sample_groups
from xray_runtime.models.causal_lm import load_tokenizer

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.kernel.graph.kind import Recorder
    from xray_runtime.methods.best_of_n.config import BestOfNConfig
    from xray_runtime.methods.best_of_n.kind import BestOfNInputs

NUM_EXAMPLES_SHOWN = 20


def run(stage: Stage[BestOfNConfig, BestOfNInputs], out: Path, recorder: Recorder) -> int:
    """Writes a dataset with the best sampled reply to each training prompt. Held-out pairs stay as they are.

    Raises:
        ValueError: no reply is kept.
    """
    config, source = stage.config, stage.inputs.prompts.path
    groups = sample_groups(stage, stage.inputs.policy.path, source, out, recorder)
    best, skipped = kept(groups.rewards, config.min_reward, config.skip_tied)
    rows = [row for row, reply in enumerate(best.tolist()) if reply != NONE]
    stats = groups.stats | skipped | {"kept": float(len(rows))}
    if not rows:
        reasons = {name: count for name, count in stats.items() if name.startswith(("skipped", "left_out")) and count}
        raise ValueError(f"{stage.name}: no reply to any of the {len(best)} prompts was kept ({reasons})")
    examples = _examples(stage, groups, rows, best)
    rewards = groups.rewards[rows, best[rows]]
    stats["reward_best"] = float(rewards.mean())
    write_pairs(out / TRAIN, Example, examples)
    for name in (HELDOUT, "dataset.json"):
        (out / name).write_bytes((source / name).read_bytes())
    keep_pictures_of(out / FOLDER, (out / TRAIN, out / HELDOUT), (source / FOLDER,))
    write_json(out / "stats.json", stats)
    recorder.metrics({f"best_of_n/{name}": value for name, value in stats.items()}, step=0)
    recorder.table(
        "best_of_n",
        ["prompt", "reply", "reward"],
        [
            [prompt_text(groups.prompts[row]), groups.replies[row][best[row]], float(groups.rewards[row, best[row]])]
            for row in rows[:NUM_EXAMPLES_SHOWN]
        ],
    )
    recorder.progress(len(rows), len(rows), "replies", "kept")
    return 0


def _examples(
    stage: Stage[BestOfNConfig, BestOfNInputs], groups: Groups, rows: list[int], best: torch.Tensor
) -> list[Example]:
    """The best replies of these prompts; of an agent's episode each call that is in the loss."""
    names = {row: f"{stage.name}-{row}" for row in rows}
    if groups.episodes is None:
        examples = []
        for row, name in names.items():
            reasoning, answer = split_reasoning(groups.replies[row][best[row]])
            examples.append(Example(name, name, groups.prompts[row], answer, reasoning_content=reasoning))
        return examples
    assert stage.config.environment is not None
    source = source_of(stage.config.environment)
    decode = partial(decode_reply, load_tokenizer(stage.inputs.policy.path))
    return [
        example
        for row, name in names.items()
        for example in source.examples(groups.episodes[row][best[row]], decode, name)
    ]


def kept(rewards: torch.Tensor, min_reward: float | None, skip_tied: bool) -> tuple[torch.Tensor, dict[str, float]]:
    """(index of each prompt's best reply [P], `NONE` if the prompt is skipped; number skipped, by the first reason);
    `rewards` [P, n] are NaN if a reply cannot be chosen."""
    best = best_of(rewards)
    without = best == NONE
    highest = rewards.gather(1, best.clamp(min=0)[:, None]).squeeze(1)
    low = ~without & (highest < min_reward) if min_reward is not None else torch.zeros_like(without)
    even = ~without & ~low & tied(rewards) if skip_tied else torch.zeros_like(without)
    counts = {
        "skipped_without_reward": float(without.sum()),
        "skipped_below_min_reward": float(low.sum()),
        "skipped_tied": float(even.sum()),
    }
    return torch.where(low | even, NONE, best), counts
