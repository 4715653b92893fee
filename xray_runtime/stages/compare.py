"""Stage `compare`: a candidate against the present champion, on held-out prompts that neither was trained on.

Each answers in its own tokenizer with the same seeds; what is judged is text, so that the two may have different
vocabularies and shapes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from xray_runtime.algorithms.statistics import bootstrap_interval, wins
from xray_runtime.config.evaluate import EvaluateConfig
from xray_runtime.data.gold import load_gold
from xray_runtime.data.pairs import Messages, prompt_text, read_examples
from xray_runtime.data.tokenizing import decode_replies, encode_prompts, encode_replies
from xray_runtime.engines.generation.sampling import Sampling
from xray_runtime.models.causal_lm import load_tokenizer
from xray_runtime.models.objectives import RewardObjective
from xray_runtime.seeding import derive_seed
from xray_runtime.stages.common import frozen_layout, generator_spec, max_prompt_tokens, text_rows, unique_prompts
from xray_runtime.stages.evaluate import record_replies
from xray_runtime.stages.reward import HEAD_FILE
from xray_runtime.stages.spec import SEEN_BY_CHAMPION, Recorder, StageSpec
from xray_runtime.workers.rows import pad
from xray_runtime.workers.specs import ModelSpec
from xray_runtime.workers.whole_model import open_models

SIDES = {"champion": "champion", "candidate": "policy"}
"""Side → role of the parent that stands on it."""
MIN_PROMPTS = 8


def run(spec: StageSpec, out: Path, recorder: Recorder) -> int:
    """Writes comparison.json, samples.json and prompts.json, as the evaluation does.

    Raises:
        ValueError: too few held-out prompts are left that the champion has not seen.
    """
    config = EvaluateConfig.model_validate(spec.sections["evaluate"])
    tokenizers = {side: load_tokenizer(spec.parent(role)) for side, role in SIDES.items()}
    prompts = asked_prompts(spec, config, tokenizers)
    asked = [prompt_text(messages) for messages in prompts]
    texts: dict[str, list[str]] = {}
    for number, (side, role) in enumerate(SIDES.items(), start=1):
        texts[side] = _replies(spec, config, spec.parent(role), tokenizers[side], prompts, recorder)
        recorder.progress(number, 3, "steps", f"asked the {side}")
    reward = spec.parent("reward")
    rewards = _rewards(spec, reward, prompts, texts, recorder)
    gold = load_gold(spec.sections["gold"]) if spec.sections["gold"] else None
    golds = {side: torch.tensor(gold(asked, texts[side])).double() for side in SIDES} if gold is not None else None
    lengths = {side: [len(ids) for ids in encode_replies(load_tokenizer(reward), texts[side])] for side in SIDES}

    comparison = compare(config, spec.seed, rewards, golds, lengths)
    record_replies(out, recorder, "comparison", "compare", comparison, asked, texts, rewards, golds, config)
    recorder.progress(3, 3, "steps", f"win rate over the champion {comparison['win_rate']:.2f}")
    return 0


def compare(
    config: EvaluateConfig,
    seed: int,
    rewards: dict[str, torch.Tensor],
    golds: dict[str, torch.Tensor] | None,
    lengths: dict[str, list[int]],
) -> dict[str, Any]:
    """The content of comparison.json.

    Args:
        rewards: side → score of each reply [n] by the candidate's reward model, in its deviations.
        golds: side → gold score of each reply [n]; None where there is no gold score, and rewards judge.
        lengths: side → tokens of each reply.
    """
    judged = golds if golds is not None else rewards

    def interval(x: torch.Tensor, name: str) -> tuple[float, list[float]]:
        mean, low, high = bootstrap_interval(x, config.bootstrap_samples, derive_seed(seed, "compare", name))
        return mean, [low, high]

    win_rate, win_ci = interval(wins(judged["candidate"], judged["champion"]), "win_rate")
    content: dict[str, Any] = {
        "samples": len(judged["candidate"]),
        "judge": "gold" if golds is not None else "reward",
        "win_rate": win_rate,
        "win_rate_ci95": win_ci,
    }
    for name, scores in {"reward": rewards, "gold": golds}.items():
        if scores is not None:
            delta, delta_ci = interval(scores["candidate"] - scores["champion"], f"{name}_delta")
            content |= {f"{name}_delta": delta, f"{name}_delta_ci95": delta_ci}
            content |= {f"{name}_{side}": float(scores[side].mean()) for side in SIDES}
    return content | {f"length_{side}": float(np.mean(lengths[side])) for side in SIDES}


def asked_prompts(spec: StageSpec, config: EvaluateConfig, tokenizers: dict[str, Any]) -> list[Messages]:
    """Held-out prompts in random order that fit both and that no dataset behind the champion has for training."""
    limit = max_prompt_tokens(spec)
    heldout = read_examples(spec.parent("dataset") / "heldout.jsonl")
    found = [messages for messages, _ in unique_prompts(tokenizers["candidate"], heldout, limit)]
    sizes = [len(ids) for ids in encode_prompts(tokenizers["champion"], found)]
    seen = {text for role in spec.parents if role.startswith(SEEN_BY_CHAMPION) for text in _trained(spec.parent(role))}
    found = [m for m, size in zip(found, sizes, strict=True) if size <= limit and prompt_text(m) not in seen]
    if len(found) < MIN_PROMPTS:
        raise ValueError(
            f"{len(found)} held-out prompts are left that the champion was not trained on; {MIN_PROMPTS} are needed: "
            "evaluate both on a dataset that neither has seen, or set promotion.max_regression=null"
        )
    order = np.random.default_rng(derive_seed(spec.seed, "compare", "prompts")).permutation(len(found))
    return [found[i] for i in order[: config.num_prompts]]


def _trained(dataset: Path) -> set[str]:
    with (dataset / "train.jsonl").open(encoding="utf-8") as file:
        return {prompt_text(json.loads(line)["prompt"]) for line in file}


def _replies(
    spec: StageSpec,
    config: EvaluateConfig,
    model: Path,
    tokenizer: Any,
    prompts: list[Messages],
    recorder: Recorder,
) -> list[str]:
    ids, lengths = pad(encode_prompts(tokenizer, prompts), tokenizer.pad_token_id)
    seeds = np.array([derive_seed(spec.seed, "compare", "sample", row) for row in range(len(prompts))])
    sampling = Sampling(config.max_new_tokens, config.temperature, tokenizer.eos_token_id, tokenizer.pad_token_id)
    generator = generator_spec(spec, model, config.max_new_tokens)
    with open_models(spec.runtime, recorder.log_dir, {"generator": generator}) as models:
        rows = {"input_ids": ids, "lengths": lengths, "seed": seeds}
        answer = ray.get(models["generator"].generate.remote(rows, sampling, 0))
    replies = [r[m].tolist() for r, m in zip(answer["response_ids"], answer["response_mask"], strict=True)]
    return decode_replies(tokenizer, replies)


def _rewards(
    spec: StageSpec, reward: Path, prompts: list[Messages], texts: dict[str, list[str]], recorder: Recorder
) -> dict[str, torch.Tensor]:
    """Side → score of each reply [n], in deviations of the reward model's own held-out scores."""
    tokenizer = load_tokenizer(reward)
    encoded = encode_prompts(tokenizer, prompts)
    model = ModelSpec(reward, RewardObjective(), head=reward / HEAD_FILE, frozen=frozen_layout(spec))
    found = {}
    summary = json.loads((reward / "reward.json").read_text())
    with open_models(spec.runtime, recorder.log_dir, {"reward": model}) as models:
        for side in SIDES:
            pairs = list(zip(encoded, encode_replies(tokenizer, texts[side]), strict=True))
            scores = ray.get(models["reward"].score.remote(text_rows(pairs, tokenizer.pad_token_id)))["scores"]
            found[side] = (torch.from_numpy(scores).double() - summary["mean"]) / summary["std"]
    return found
