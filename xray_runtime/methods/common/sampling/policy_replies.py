"""A policy's replies to evaluation prompts: one reply each, or an episode with an environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xray_runtime.cluster.protocols import ModelHandle
from xray_runtime.data.chat_format import chat_format
from xray_runtime.data.ragged import Ragged
from xray_runtime.data.tokenizing import decode_replies
from xray_runtime.methods.common.sampling.episode import Prompt, episode_means
from xray_runtime.methods.common.sampling.episode_source import open_episodes, sample_all
from xray_runtime.methods.common.sampling.sampled_replies import sample_replies, sampling_of
from xray_runtime.methods.common.sampling.scoring import episode_scores, own_texts, reasoning_lengths, shown_episodes
from xray_runtime.methods.common.sampling.turns import sampling_turn
from xray_runtime.rewards.source import Score

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.methods.evaluate.config import EvaluationConfig


@dataclass(frozen=True)
class PolicyReplies:
    """Replies to prompts, row by row."""

    begun: Sequence[Sequence[int]]
    """Tokens of the prompt, or of the environment's own beginning of the episode."""
    ids: Sequence[Sequence[int]]
    """All tokens after the prompt."""
    own: list[list[int]]
    """The tokens that the policy sampled."""
    texts: list[str]
    """`own` as text."""
    shown: list[str]
    """`ids` as text for display (`shown_episodes`)."""
    reasoning_lengths: list[int]
    """Tokens of each reply's reasoning."""
    mask: Ragged | None = None
    """True where the policy sampled the token of `ids`; None: it sampled all."""
    branches: Ragged | None = None
    """Only of agents' episodes."""
    scores: list[Score] | None = None
    """The environment's scores."""
    means: dict[str, float] = field(default_factory=dict)
    """`episode_means`."""


def sample_policy(
    stage: Stage[EvaluationConfig, Any],
    generator: ModelHandle,
    model: Path,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    columns: Mapping[str, Sequence[Any]],
    max_prompt: int,
    log_dir: Path,
    out: Path,
    side: str,
    version: int = 0,
) -> PolicyReplies:
    """Sample from version `version` of the generator's weights; the seeds do not depend on the version.

    Args:
        model: the checkpoint of `generator` and `tokenizer`.
        columns: columns of the dataset, one value per prompt.
        max_prompt: the most tokens that an episode may begin with.
        log_dir, out: as `open_episodes` takes them.
        side: which of the compared models it is.
    """
    sampling, form = sampling_of(stage.config, model, tokenizer), chat_format(tokenizer)
    with open_episodes(stage, generator, sampling, tokenizer, max_prompt, log_dir, out) as episodes:
        if episodes is None:
            begun = [ids for _, ids in prompts]
            replies = sample_replies(generator, stage, sampling, begun, version)
            texts = decode_replies(tokenizer, replies)
            lengths = [form.num_reasoning(reply) for reply in replies]
            return PolicyReplies(begun, replies, replies, texts, texts, lengths)
        with sampling_turn(stage.runtime, generator):
            played = sample_all(episodes, prompts, columns, version, side=side)
    own, mask = [ids.tolist() for ids in played.own_tokens()], played.response_mask
    shown = shown_episodes(tokenizer, played)
    begun, ids = ([row.tolist() for row in column] for column in (played.prompt_ids, played.response_ids))
    texts, means = own_texts(tokenizer, played), episode_means(played)
    lengths = reasoning_lengths(tokenizer, played)
    branches = played.branches if "branches" in played else None
    return PolicyReplies(begun, ids, own, texts, shown, lengths, mask, branches, episode_scores(played), means)
