"""What a policy says to prompts that it is judged by: one reply each, or an episode with an environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xray_runtime.data.rows import Ragged
from xray_runtime.data.tokenizing import decode_replies, transcript
from xray_runtime.rewards.source import Score
from xray_runtime.rl.episode import episode_means
from xray_runtime.rl.episodes import Prompt, open_episodes
from xray_runtime.rl.sampled_replies import sample_replies, sampling_of
from xray_runtime.rl.scoring import episode_scores, own_texts
from xray_runtime.workers.protocols import ModelHandle

if TYPE_CHECKING:
    from xray_runtime.config.evaluate import EvaluationConfig
    from xray_runtime.graph.kind import Stage


@dataclass(frozen=True)
class PolicyReplies:
    """To one prompt a row."""

    begun: Sequence[Sequence[int]]
    """Tokens of the prompt, as the environment began the episode where there is one."""
    ids: Sequence[Sequence[int]]
    """All tokens after it."""
    own: list[list[int]]
    """Those that the policy chose."""
    texts: list[str]
    """What they say."""
    shown: list[str]
    """For people: with what was read between turns in brackets."""
    mask: Ragged | None = None
    """Which of `ids` the policy chose; None: all."""
    scores: list[Score] | None = None
    """What the environment gave."""
    means: dict[str, float] = field(default_factory=dict)
    """`episode_means`."""


def ask_policy(
    stage: Stage[EvaluationConfig, Any],
    generator: ModelHandle,
    model: Path,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    columns: Mapping[str, Sequence[Any]],
    max_prompt: int,
    log_dir: Path,
    version: int = 0,
) -> PolicyReplies:
    """Ask version `version` of the weights that `generator` holds; the seeds are the same for any.

    Args:
        model: the checkpoint that `generator` and `tokenizer` are of.
        columns: of the dataset, a value for each prompt.
        max_prompt: tokens that an episode may begin with.
    """
    sampling = sampling_of(stage.config, model, tokenizer)
    with open_episodes(stage, generator, sampling, tokenizer, max_prompt, log_dir) as episodes:
        if episodes is None:
            begun = [ids for _, ids in prompts]
            replies = sample_replies(generator, stage, sampling, begun, version)
            texts = decode_replies(tokenizer, replies)
            return PolicyReplies(begun, replies, replies, texts, texts)
        played = episodes.sample_all(prompts, columns, version)
    assert played.episodes is not None
    own, mask = [ids.tolist() for ids in played.own_tokens()], played.episodes.response_mask
    shown = [transcript(tokenizer, ids, of_row) for ids, of_row in zip(played.response_ids, mask, strict=True)]
    begun, ids = ([row.tolist() for row in column] for column in (played.episodes.prompt_ids, played.response_ids))
    texts, means = own_texts(tokenizer, played), episode_means(played.episodes)
    return PolicyReplies(begun, ids, own, texts, shown, mask, episode_scores(played), means)
