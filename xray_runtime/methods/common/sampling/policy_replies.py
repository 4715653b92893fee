"""A policy's replies to given prompts, batch by batch: one reply each, or an episode with an environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xray_runtime.cluster.generator_spec import GeneratorSpec
from xray_runtime.data.batch import Rollout
from xray_runtime.methods.common.sampling.episode import EpisodeBatch, Prompt, episode_means
from xray_runtime.methods.common.sampling.episode_source import RolloutSampler, SamplerSetup, open_episodes
from xray_runtime.methods.common.sampling.sampled_replies import ReplySampler, sampling_of
from xray_runtime.methods.common.sampling.scoring import (
    episode_scores,
    own_texts,
    prompt_tokens,
    reasoning_lengths,
    shown_episodes,
)
from xray_runtime.methods.common.sampling.turns import sampling_turn
from xray_runtime.rewards.source import Score

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.data.tokenizer import Tokenizer
    from xray_runtime.methods.common.training.prompts import UniquePrompts

GENERATION_BATCH = 512
"""Number of prompts in one call of a generator."""


@contextmanager
def open_sampler(setup: SamplerSetup) -> Iterator[RolloutSampler]:
    """The stage's episodes, or single replies if it has no environment."""
    with open_episodes(setup) as episodes:
        yield ReplySampler(setup.stage, setup.generator, setup.sampling) if episodes is None else episodes


def sample_all(
    setup: SamplerSetup,
    prompts: Sequence[Prompt],
    columns: Mapping[str, Sequence[Any]],
    version: int = 0,
    group_size: int = 1,
    side: str = "",
    done: Callable[[int], None] = lambda count: None,
) -> Rollout:
    """A reply, or an episode, of each prompt, batch by batch; `side` as in `EpisodeBatch`, `done` is called with the
    number of rows so far."""
    parts: list[Rollout] = []
    with open_sampler(setup) as sampler, sampling_turn(setup.stage.runtime, setup.generator):
        for start in range(0, len(prompts), GENERATION_BATCH):
            part = slice(start, start + GENERATION_BATCH)
            of_part = {name: values[part] for name, values in columns.items()}
            batch = EpisodeBatch(prompts[part], of_part, version, "sample", 0, group_size, start, side, keep=True)
            parts.append(sampler.sample(batch))
            done(start + len(parts[-1].response_ids))
    return Rollout.concat(parts)


def sample_groups_of(
    stage: Stage[Any, Any],
    policy: Path,
    tokenizer: Tokenizer,
    prompts: UniquePrompts,
    chosen: Sequence[int],
    group_size: int,
    reply_tokens: int,
    log_dir: Path,
    out: Path,
    done: Callable[[int], None],
) -> Rollout:
    """`group_size` replies, or episodes, of `policy` to each of the `chosen` prompts, one after another.

    Args:
        reply_tokens: the most tokens after a prompt.
        log_dir, out: as in `SamplerSetup`.
        done: as in `sample_all`.
    """
    rows, sampling = [row for row in chosen for _ in range(group_size)], sampling_of(stage.config, policy, tokenizer)
    spec = GeneratorSpec(policy, prompts.room + reply_tokens, stage.config.generator)
    with stage.open_models({"generator": spec}) as models:
        setup = SamplerSetup(stage, models["generator"], sampling, tokenizer, prompts.room, log_dir, out)
        given = [prompts[row] for row in rows], prompts.columns(rows)
        return sample_all(setup, *given, group_size=group_size, done=done)


@dataclass(frozen=True)
class PolicyReplies:
    """Replies to prompts, row by row."""

    rollout: Rollout
    begun: Sequence[Sequence[int]]
    """Tokens of the prompt, or of the environment's own beginning of the episode."""
    texts: list[str]
    """The policy's samples, as text."""
    shown: list[str]
    """The whole reply or episode as text for display."""
    reasoning_lengths: list[int]
    """Tokens of each reply's reasoning."""

    @property
    def scores(self) -> list[Score] | None:
        """The environment's scores."""
        return episode_scores(self.rollout)

    @property
    def means(self) -> dict[str, float]:
        return episode_means(self.rollout) if self.rollout.are_episodes else {}


def sample_policy(
    setup: SamplerSetup,
    prompts: Sequence[Prompt],
    columns: Mapping[str, Sequence[Any]],
    side: str,
    version: int = 0,
) -> PolicyReplies:
    """Sample from version `version` of the generator's weights; the seeds do not depend on the version.

    Args:
        columns: columns of the dataset, one value per prompt.
        side: which of the compared models it is.
    """
    tokenizer, played = setup.tokenizer, sample_all(setup, prompts, columns, version, side=side)
    texts = own_texts(tokenizer, played)
    shown = shown_episodes(tokenizer, played) if played.are_episodes else texts
    begun = [list(ids) for ids in prompt_tokens(played, [ids for _, ids in prompts])]
    return PolicyReplies(played, begun, texts, shown, reasoning_lengths(tokenizer, played))
