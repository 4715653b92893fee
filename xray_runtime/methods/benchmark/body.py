"""Stage `benchmark`: one suite on one policy. Its numbers are absolute; `evaluate` compares models.

Every suite writes benchmark.json (`suite`, `samples`, its numbers), prompts.json (all prompts, for the check that none
was trained on) and samples.json.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from xray_runtime.algorithms.statistics import bootstrap_interval, bootstrap_ratio, pass_at_k, wilson_interval
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.cluster.protocols import get
from xray_runtime.data.pairs import HELDOUT, VALIDATION, Example, Messages, Pairs, prompt_text
from xray_runtime.data.tokens import Tokens
from xray_runtime.kernel.seeding import derive_seed
from xray_runtime.methods.benchmark.config import (
    EnvironmentSuite,
    PassAtKSuite,
    PerplexitySuite,
    SampledSuite,
    SideConfig,
    WordsSuite,
)
from xray_runtime.methods.common.results import plain_numbers, write_results
from xray_runtime.methods.common.sampling.episode import episode_means
from xray_runtime.methods.common.sampling.policy_replies import sample_groups_of
from xray_runtime.methods.common.sampling.scoring import own_texts, shown_episodes
from xray_runtime.methods.common.training.dataset import max_prompt_tokens, max_reply_tokens, tokenizing
from xray_runtime.methods.common.training.prompts import UniquePrompts, drawn
from xray_runtime.models.causal_lm import load_tokenizer
from xray_runtime.models.objectives import SFTObjective
from xray_runtime.rewards.source import Batch
from xray_runtime.rewards.verifiers import VerifierSource

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.data.batch import Rollout
    from xray_runtime.kernel.graph.kind import Recorder
    from xray_runtime.methods.benchmark.kind import BenchmarkInputs

SIDES = {"heldout": HELDOUT, "validation": VALIDATION}
NUM_ROWS_SHOWN = 24
BATCH = 512
"""Rows per scoring call."""


@dataclass(frozen=True)
class SuiteResult:
    numbers: dict[str, float | list[float]]
    prompts: list[str]
    """The distinct prompts."""
    samples: list[dict[str, Any]]
    """A few readable rows; each has its `prompt`."""


def run(stage: Stage[Any, BenchmarkInputs], out: Path, recorder: Recorder) -> int:
    """Writes the files above.

    Raises:
        ValueError: the dataset has no such side, or no row of it fits.
    """
    results = SUITES[stage.config.suite](stage, recorder, out)
    content = {"suite": stage.config.suite, "samples": len(results.prompts), **results.numbers}
    write_results(out, recorder, "benchmark.json", content, results.prompts, results.samples)
    recorder.metrics(plain_numbers(content, "benchmark"), step=0)
    note = ", ".join(f"{name} {value:.3g}" for name, value in results.numbers.items() if isinstance(value, int | float))
    recorder.progress(len(results.prompts), len(results.prompts), "prompts", note)
    return 0


def _perplexity(stage: Stage[PerplexitySuite, BenchmarkInputs], recorder: Recorder, out: Path) -> SuiteResult:
    config, (dataset, side) = stage.config, _side(stage)
    tokenizer = load_tokenizer(stage.inputs.policy.path)
    tokens, pairs = Tokens(side, Example, tokenizer, stage.seal, tokenizing(recorder)), Pairs(side, Example)
    replies = tokens.lengths["input_ids"] - tokens.prompt_lengths
    longest = max_reply_tokens(config.max_response_tokens, stage.inputs.policy.path)
    fits = tokens.prompt_lengths <= max_prompt_tokens(dataset, stage.inputs.policy.path, longest)
    fits &= replies <= longest
    answered = np.fromiter((pair.has_reply for pair in pairs), bool, len(pairs))
    rows = _chosen(stage, np.flatnonzero(fits & answered), config.num_rows)
    nll, counts = [], []
    spec = ModelSpec(stage.inputs.policy.path, SFTObjective(), frozen=config.frozen)
    with stage.open_models({"policy": spec}) as models:
        for start in range(0, len(rows), BATCH):
            batch = tokens.take(rows[start : start + BATCH])
            nll.append(get(models["policy"].score.remote(batch)).nll)
            counts.append(batch.input_ids.lengths - batch.prompt_lengths)
            recorder.progress(start, len(rows), "rows", "scored")
    sums, lengths = (torch.from_numpy(np.concatenate(parts)).double() for parts in (nll, counts))
    mean, low, high = bootstrap_ratio(sums, lengths, config.bootstrap_samples, _resamples(stage))
    numbers: dict[str, Any] = {"perplexity": math.exp(mean), "perplexity_ci95": [math.exp(low), math.exp(high)]}
    numbers |= {"nll": mean, "rows": len(rows), "tokens": int(lengths.sum())}
    numbers["left_out_too_long"] = int((~fits & answered).sum())
    prompt_texts = [prompt_text(pairs[row].prompt) for row in rows.tolist()]
    per_token = (sums / lengths).tolist()
    shown = [
        {"prompt": prompt_texts[i], "reply": pairs[int(rows[i])].response, "nll": per_token[i]}
        for i in range(min(NUM_ROWS_SHOWN, len(rows)))
    ]
    return SuiteResult(numbers, list(dict.fromkeys(prompt_texts)), shown)


def _pass_at_k(stage: Stage[PassAtKSuite, BenchmarkInputs], recorder: Recorder, out: Path) -> SuiteResult:
    config = stage.config
    verifier = VerifierSource(config.verifier, f"{stage.name}.verifier")
    verifier.check(stage.inputs.prompts.path, ())
    prompts, columns, tokenizer, sampled = _sampled(stage, recorder, out, config.samples, config.max_new_tokens)
    replies = own_texts(tokenizer, sampled)
    column = config.verifier.column
    if column is not None and column not in columns:
        raise ValueError(
            f"{stage.name}.verifier.column: {column!r} is not a column of the dataset: add it to data.columns"
        )
    each = [messages for messages in prompts for _ in range(config.samples)]
    values = {name: [value for value in of for _ in range(config.samples)] for name, of in columns.items()}
    batch = Batch([prompt_text(messages) for messages in each], replies, each, values)
    scores = verifier.score(batch)
    passed = torch.tensor([score.value for score in scores], dtype=torch.float64).view(-1, config.samples)
    checked = ~passed.isnan().any(1)
    if not checked.any():
        raise RuntimeError(f"{stage.name}: no reply could be checked; {next(s.why for s in scores if s.why)}")
    right = passed[checked].sum(1)
    numbers: dict[str, Any] = {"prompts_checked": int(checked.sum()), "replies": len(replies)}
    for k in sorted(set(config.k)):
        rate, low, high = bootstrap_interval(
            pass_at_k(config.samples, right, k), config.bootstrap_samples, _resamples(stage)
        )
        numbers |= {f"pass_at_{k}": rate, f"pass_at_{k}_ci95": [low, high]}
    prompt_texts = [prompt_text(messages) for messages in prompts]
    shown = [
        {
            "prompt": prompt_texts[i],
            "reply": replies[i * config.samples],
            "passed": float(passed[i].nan_to_num(0.0).mean()),
        }
        for i in range(min(config.num_samples_shown, len(prompt_texts)))
    ]
    return SuiteResult(numbers, prompt_texts, shown)


def _word_shares(stage: Stage[WordsSuite, BenchmarkInputs], recorder: Recorder, out: Path) -> SuiteResult:
    config = stage.config
    patterns = {name: _pattern(f"{stage.name}.lists.{name}", words) for name, words in config.lists.items()}
    prompts, _, tokenizer, sampled = _sampled(stage, recorder, out, 1, config.max_new_tokens)
    replies = own_texts(tokenizer, sampled)
    numbers: dict[str, Any] = {"replies": len(replies)}
    for name, pattern in sorted(patterns.items()):
        share = sum(bool(pattern.search(reply)) for reply in replies) / len(replies)
        # Wilson's interval gives an upper bound even if no reply of 256 contains a word.
        numbers |= {name: share, f"{name}_ci95": list(wilson_interval(share, len(replies)))}
    prompt_texts = [prompt_text(messages) for messages in prompts]
    marked = [[name for name, pattern in patterns.items() if pattern.search(reply)] for reply in replies]
    # Replies with a word come first.
    order = sorted(range(len(replies)), key=lambda row: not marked[row])[: config.num_samples_shown]
    shown = [{"prompt": prompt_texts[i], "reply": replies[i], "lists": ", ".join(marked[i])} for i in order]
    return SuiteResult(numbers, prompt_texts, shown)


def _environment(stage: Stage[EnvironmentSuite, BenchmarkInputs], recorder: Recorder, out: Path) -> SuiteResult:
    config = stage.config
    prompts, _, tokenizer, played = _sampled(stage, recorder, out, config.samples, config.environment.max_tokens)
    rewards = torch.from_numpy(played.episode_reward).view(-1, config.samples)
    scored = ~rewards.isnan()
    if not scored.any():
        raise RuntimeError(f"{stage.name}: every episode failed; {played.failure[0]}")
    numbers: dict[str, Any] = {"episodes": len(rewards.view(-1)), "failed": float((~scored).double().mean())}
    by_prompt = scored.any(1)
    for name, values in {"success": (rewards >= config.success).double(), "reward": rewards}.items():
        means = torch.where(scored, values, torch.nan).nanmean(1)[by_prompt]
        mean, low, high = bootstrap_interval(means, config.bootstrap_samples, _resamples(stage))
        numbers |= {name: mean, f"{name}_ci95": [low, high]}
    numbers |= {"ended": float(played.ended[scored.view(-1).numpy()].mean())} | episode_means(played)
    prompt_texts = [prompt_text(messages) for messages in prompts]
    outcomes = zip(shown_episodes(tokenizer, played), rewards.view(-1).tolist(), strict=True)
    shown = [
        {"prompt": prompt, "episode": episode, "reward": None if math.isnan(reward) else reward}
        for prompt, (episode, reward) in zip(prompt_texts, islice(outcomes, None, None, config.samples), strict=True)
    ]
    return SuiteResult(numbers, prompt_texts, shown[: config.num_samples_shown])


SUITES: Mapping[str, Callable[[Stage[Any, BenchmarkInputs], Recorder, Path], SuiteResult]] = {
    "perplexity": _perplexity,
    "pass_at_k": _pass_at_k,
    "words": _word_shares,
    "environment": _environment,
}


def _pattern(field: str, words: list[str] | str) -> re.Pattern[str]:
    lines = Path(words).read_text(encoding="utf-8").splitlines() if isinstance(words, str) else words
    found = [re.escape(word.strip()) for word in lines if word.strip()]
    if not found:
        raise ValueError(f"{field}: contains no words")
    return re.compile(rf"(?<!\w)(?:{'|'.join(found)})(?!\w)", re.IGNORECASE)


def _side(stage: Stage[Any, BenchmarkInputs]) -> tuple[Path, Path]:
    """(the dataset, the file of its rows)."""
    config: SideConfig = stage.config
    dataset = stage.inputs.prompts.path
    if not (dataset / SIDES[config.split]).exists():
        raise ValueError(f"{stage.name}.split: the dataset has no {config.split} rows: set data.validation_fraction")
    return dataset, dataset / SIDES[config.split]


def _chosen(stage: Stage[Any, Any], rows: np.ndarray, count: int) -> np.ndarray:
    if not len(rows):
        raise ValueError(f"{stage.name}: no row of the dataset fits")
    return rows[drawn(stage, len(rows), count)]


def _resamples(stage: Stage[Any, Any]) -> int:
    return derive_seed(stage.seed, stage.name, "bootstrap")


def _sampled(
    stage: Stage[Any, BenchmarkInputs], recorder: Recorder, out: Path, samples: int, reply_tokens: int
) -> tuple[list[Messages], dict[str, list[Any]], Any, Rollout]:
    """(prompts, columns that the dataset carries for them, tokenizer, `samples` replies or episodes to each prompt,
    grouped by prompt)."""
    config: SampledSuite = stage.config
    policy, (dataset, side) = stage.inputs.policy.path, _side(stage)
    tokenizer, limit = load_tokenizer(policy), max_prompt_tokens(dataset, policy, reply_tokens)
    prompts = UniquePrompts(tokenizer, side, limit, stage.seal)
    chosen = _chosen(stage, np.arange(len(prompts)), config.num_prompts).tolist()
    unit, note = ("episodes", "played") if isinstance(config, EnvironmentSuite) else ("replies", "sampled")
    done = partial(recorder.progress, total=len(chosen) * samples, unit=unit, note=note)
    given = stage, policy, tokenizer, prompts, chosen, samples, reply_tokens, recorder.log_dir, out, done
    return [prompts[i][0] for i in chosen], prompts.columns(chosen), tokenizer, sample_groups_of(*given)
