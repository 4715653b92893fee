"""Two models' replies held against each other: by gold score, by rewards, with intervals. For evaluate and compare."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from xray_runtime.algorithms.statistics import bootstrap_interval, wins
from xray_runtime.data.gold import load_gold
from xray_runtime.data.rows import Ragged
from xray_runtime.engines.generation.sampling import Sampling
from xray_runtime.models.causal_lm import stops_of
from xray_runtime.seeding import derive_seed
from xray_runtime.workers.protocols import ModelHandle, get

if TYPE_CHECKING:
    from xray_runtime.config.evaluate import EvaluationConfig
    from xray_runtime.stages.kind import Recorder, Stage

Scores = Mapping[str, torch.Tensor]
"""Side → score of each reply [n], float64; NaN where it has none: then the pair of replies is left out."""


def sample_replies(
    generator: ModelHandle,
    stage: Stage[Any, Any],
    model: Path,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    version: int = 0,
) -> list[list[int]]:
    """Token ids of one reply a prompt; a row has the same seed whichever model replies.

    Args:
        model: the checkpoint that `generator` and `tokenizer` are of.
    """
    config: EvaluationConfig = stage.config
    seeds = np.array([derive_seed(stage.seed, stage.name, "sample", row) for row in range(len(prompts))])
    stops = stops_of(model, tokenizer)
    sampling = Sampling.of(config, stops, tokenizer.pad_token_id)
    rows = {"input_ids": Ragged.of(prompts), "seed": seeds}
    answer = get(generator.generate.remote(rows, sampling, version))
    return [reply.tolist() for reply in answer["response_ids"]]


def gold_scores(stage: Stage[Any, Any], asked: Sequence[str], texts: Mapping[str, Sequence[str]]) -> Scores | None:
    """Gold score of each side's replies; None where the config names none."""
    if stage.config.gold is None:
        return None
    gold = load_gold(stage.config.gold, stage.functions)
    return {side: torch.tensor(gold(asked, replies)).double() for side, replies in texts.items()}


def judge(
    config: EvaluationConfig,
    seed: int,
    stage: str,
    better: str,
    worse: str,
    rewards: Scores | None,
    golds: Scores | None,
) -> dict[str, Any]:
    """Win rate of side `better` over `worse`, and differences of scores, with 95% intervals.

    `judge` says whose scores decide a win: the gold score's where there is one, else the rewards'; null, as the win
    rate is, where there is neither.

    Raises:
        RuntimeError: no pair of replies has both its rewards.
    """
    rewards = _both_scored(rewards, stage) if rewards is not None else None
    judged, name = (golds, "gold") if golds is not None else (rewards, "reward" if rewards is not None else None)

    def interval(x: torch.Tensor, purpose: str) -> tuple[float, list[float]]:
        mean, low, high = bootstrap_interval(x, config.bootstrap_samples, derive_seed(seed, stage, purpose))
        return mean, [low, high]

    content: dict[str, Any] = {"judge": name, "win_rate": None, "win_rate_ci95": None}
    if judged is not None:
        rate, rate_ci = interval(wins(judged[better], judged[worse]), "win_rate")
        content |= {"win_rate": rate, "win_rate_ci95": rate_ci}
    for kind, scores in {"reward": rewards, "gold": golds}.items():
        delta: tuple[float | None, list[float] | None] = (None, None)
        if scores is not None:
            delta = interval(scores[better] - scores[worse], f"{kind}_delta")
        content |= {f"{kind}_delta": delta[0], f"{kind}_delta_ci95": delta[1]}
        content |= {
            f"{kind}_{side}": float(scores[side].mean()) if scores is not None else None for side in (worse, better)
        }
    return content


def _both_scored(scores: Scores, stage: str) -> Scores:
    """The rows where every side has a score."""
    there = ~torch.stack(list(scores.values())).isnan().any(0)
    if not there.any():
        raise RuntimeError(f"{stage}: no prompt has a reward for both replies")
    return {side: of_side[there] for side, of_side in scores.items()}


def record_replies(
    out: Path,
    recorder: Recorder,
    name: str,
    prefix: str,
    summary: dict[str, Any],
    asked: list[str],
    texts: Mapping[str, Sequence[str]],
    rewards: Scores | None,
    golds: Scores | None,
    config: EvaluationConfig,
) -> None:
    """Write `summary` as NAME.json and metrics `prefix`/…, the prompts, and replies of each side next to each other."""

    def score(scores: Scores | None, side: str, row: int) -> float | None:
        return None if scores is None or scores[side][row].isnan() else float(scores[side][row])

    samples: list[dict[str, Any]] = [
        dict[str, Any]({"prompt": asked[i]})
        | {side: texts[side][i] for side in texts}
        | {f"reward_{side}": score(rewards, side, i) for side in texts}
        | {f"gold_{side}": score(golds, side, i) for side in texts}
        for i in range(min(config.num_samples_shown, len(asked)))
    ]
    (out / f"{name}.json").write_text(json.dumps(summary, indent=2, sort_keys=True) + "\n")
    (out / "prompts.json").write_text(json.dumps(asked, indent=1, ensure_ascii=False) + "\n")
    (out / "samples.json").write_text(json.dumps(samples, indent=2, ensure_ascii=False) + "\n")
    recorder.metrics({f"{prefix}/{k}": float(v) for k, v in summary.items() if isinstance(v, int | float)}, step=0)
    recorder.table("samples", list(samples[0]), [list(sample.values()) for sample in samples])
