"""Several sampled replies to each prompt, with their rewards, for `best_of_n` and `preferences` to choose from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from xray_runtime.cluster.generator_spec import GeneratorSpec
from xray_runtime.data.gold import GoldScore, load_gold
from xray_runtime.data.pairs import TRAIN, Messages, prompt_text
from xray_runtime.data.reasoning import answers_of
from xray_runtime.methods.common.results import metric_name
from xray_runtime.methods.common.sampling.episode import EpisodeBatch
from xray_runtime.methods.common.sampling.episode_source import SamplerSetup
from xray_runtime.methods.common.sampling.policy_replies import GENERATION_BATCH, open_sampler
from xray_runtime.methods.common.sampling.sampled_replies import sampling_of
from xray_runtime.methods.common.sampling.scoring import episode_scores, own_texts
from xray_runtime.methods.common.sampling.turns import sampling_turn
from xray_runtime.methods.common.training.dataset import max_prompt_tokens
from xray_runtime.methods.common.training.prompts import UniquePrompts, drawn
from xray_runtime.methods.common.training.resumable import Resumable
from xray_runtime.models.causal_lm import load_tokenizer
from xray_runtime.rewards.reward_sources import RewardSources

if TYPE_CHECKING:
    from pathlib import Path

    from xray_runtime.cluster.stage import Stage
    from xray_runtime.kernel.graph.kind import Recorder
    from xray_runtime.methods.best_of_n.config import GroupsConfig


@dataclass(frozen=True)
class Groups:
    """The replies to P prompts, n to each."""

    prompts: list[Messages]
    replies: list[list[str]]
    rewards: torch.Tensor
    """[P, n]; NaN if a reply cannot be chosen."""
    stats: dict[str, float]
    """Counts of replies that cannot be chosen, by reason, and means."""
    episodes: list[list[str]] | None = None
    """JSON records of the agents' episodes, if they are that."""


@dataclass
class _Done:
    """The replies so far: the whole state of the stage."""

    replies: list[str] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    scores: dict[str, list[float]] = field(default_factory=dict)
    """Source of reward → its score of each reply."""
    episodes: list[str] = field(default_factory=list)
    """Records of agents."""


def sample_groups(stage: Stage[Any, Any], policy: Path, dataset: Path, out: Path, recorder: Recorder) -> Groups:
    """Sample and score replies of `policy` to the dataset's training prompts, each with its own seed. The checkpoint
    `out` keeps the records of agents.

    Raises:
        ValueError: the dataset has no prompt that fits.
    """
    config: GroupsConfig = stage.config
    tokenizer, limit = load_tokenizer(policy), max_prompt_tokens(dataset, policy, config.max_response_tokens)
    found = UniquePrompts(tokenizer, dataset / TRAIN, limit, stage.seal)
    if not len(found):
        raise ValueError(f"{stage.name}: no prompt has at most {limit} tokens")
    limit = found.room
    order = drawn(stage, len(found), config.num_prompts)
    num_replies = len(order) * config.samples
    # Batches of equal size: a small last one might have fewer rows than a reward model has ranks.
    batches = np.array_split(order, max(num_replies // GENERATION_BATCH, 1))
    sampling = sampling_of(config, policy, tokenizer)
    sources, done = RewardSources(stage), _Done()
    gold = load_gold(config.gold, stage.functions) if config.gold is not None else None
    generator = GeneratorSpec(policy, limit + config.max_response_tokens, config.generator)
    with (
        stage.open_models({"generator": generator, **sources.specs()}) as models,
        open_sampler(
            SamplerSetup(stage, models["generator"], sampling, tokenizer, limit, recorder.log_dir, out)
        ) as sampler,
    ):
        state = Resumable(recorder, {}, done=done)
        for number in range(state.restore(), len(batches)):
            numbers = [i for i in batches[number].tolist() for _ in range(config.samples)]
            batch = [found[i] for i in numbers]
            first, columns = len(done.replies), found.columns(numbers)
            wanted = EpisodeBatch(batch, columns, 0, "sample", 0, config.samples, first, keep=True)
            with sampling_turn(stage.runtime, models["generator"]):
                played = sampler.sample(wanted)
            replies, prompts = own_texts(tokenizer, played), [messages for messages, _ in batch]
            requests, episodes = sources.requests(models, prompts, replies), episode_scores(played)
            scores = sources.scores(requests, prompts, replies, columns, step=number, episodes=episodes)
            for name, of_source in scores.values.items():
                done.scores.setdefault(name, []).extend(of_source.tolist())
            done.rewards += sources.scaled(scores).tolist()
            done.replies += replies
            done.ended += played.ended.tolist()
            done.episodes += played.answers.tolist() if played.are_episodes else []
            recorder.progress(len(done.replies), num_replies, "replies", "sampled and scored")
            state.step_done(number + 1, len(batches))
    return _groups(config, [found[i][0] for i in order], done, gold)


def _groups(config: GroupsConfig, prompts: list[Messages], done: _Done, gold: GoldScore | None = None) -> Groups:
    """Group the replies by prompt. A reply can be chosen if it has a reward and text and `truncated` keeps it."""
    rewards = torch.tensor(done.rewards, dtype=torch.float64)
    failed = ~rewards.isfinite()
    empty = torch.tensor([not answer.strip() for answer in answers_of(done.replies)])
    cut = ~torch.tensor(done.ended) if config.truncated == "drop" else torch.zeros_like(empty)
    out = failed | empty | cut
    stats = {
        "replies": float(len(rewards)),
        "left_out_score_failed": float(failed.sum()),
        "left_out_truncated": float((cut & ~failed).sum()),
        "left_out_empty": float((empty & ~cut & ~failed).sum()),
    }
    for name, scores in done.scores.items():
        finite = [score for score in scores if math.isfinite(score)]
        if finite:
            stats[f"source/{metric_name(name)}"] = sum(finite) / len(finite)
    if not out.all():
        stats["reward"] = float(rewards[~out].mean())
    if gold is not None:
        texts = [prompt_text(messages) for messages in prompts for _ in range(config.samples)]
        stats["gold"] = float(np.mean(gold(texts, done.replies)))
    size = config.samples
    replies = [done.replies[start : start + size] for start in range(0, len(done.replies), size)]
    starts = range(0, len(done.episodes), size)
    episodes = [done.episodes[start : start + size] for start in starts] if done.episodes else None
    return Groups(prompts, replies, rewards.masked_fill(out, torch.nan).view(-1, size), stats, episodes)
