"""Validation during training: replies to prompts that are neither trained nor reported on, and the best version.

sample   the generator replies with the policy after `iteration` updates, with the same seeds each time
score    the stage's `judges`, or else its rewards, score the replies
last     the last version is scored too; `keep: best` publishes the best version, the earliest if several are equal
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from xray_runtime.cluster.protocols import ModelHandle, get
from xray_runtime.data.batch import Rollout, Scores, TextBatch, with_end_of_turn
from xray_runtime.engines.sampling import Sampling
from xray_runtime.methods.common.sampling.episode import EpisodeBatch
from xray_runtime.methods.common.sampling.sampled_replies import ReplySampler
from xray_runtime.methods.common.sampling.scoring import episode_scores, own_texts, prompt_tokens
from xray_runtime.methods.common.sampling.turns import sampling_turn, trained_models
from xray_runtime.methods.common.training.dataset import validation_file
from xray_runtime.methods.common.training.policy_versions import BestVersion
from xray_runtime.methods.common.training.prompts import UniquePrompts, drawn
from xray_runtime.rewards.reward_reader import answer_rows
from xray_runtime.rewards.reward_sources import RewardSources

if TYPE_CHECKING:
    from xray_runtime.cluster.model_spec import ModelSpec
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.data.tokenizer import Tokenizer
    from xray_runtime.methods.common.sampling.episode_source import EpisodeSampler
    from xray_runtime.methods.ppo.config import PPOConfig
    from xray_runtime.methods.ppo.kind import PPOInputs


class Validation:
    """Scores the policy every so many iterations; does nothing without `validation` in the config.

    Raises:
        ValueError: the dataset has no validation rows, or fewer than the ranks that score them.
    """

    def __init__(
        self,
        stage: Stage[PPOConfig, PPOInputs],
        rewards: RewardSources,
        tokenizer: Tokenizer,
        sampling: Sampling,
        stops: tuple[int, ...],
        directory: Path,
        max_prompt: int,
    ) -> None:
        self._stage, self._config = stage, stage.config.validation
        self._tokenizer, self._sampling, self._stops = tokenizer, sampling.bare(), stops
        self.best = BestVersion(directory, self._config)
        self.room = 0
        """Tokens of its longest prompt; see `UniquePrompts.room`."""
        judges = RewardSources(stage, tokenizer, field="judges")
        self._sources, self._own = (judges, True) if any(judges.weights.values()) else (rewards, False)
        if self._config is None:
            return
        dataset = stage.inputs.prompts.path
        prompts = UniquePrompts(tokenizer, validation_file(stage.name, dataset), max_prompt, stage.seal)
        self.room = prompts.room
        chosen = drawn(stage, len(prompts), self._config.num_prompts, "validation")
        if len(chosen) < stage.config.frozen.data_parallel:
            few = f"{stage.name}.validation: {len(chosen)} prompts are fewer than the ranks that score them"
            raise ValueError(f"{few}: raise data.validation_fraction")
        self._prompts, self._columns = [prompts[i] for i in chosen], prompts.columns(chosen)

    def specs(self) -> dict[str, ModelSpec]:
        """Specs of the judges that are models, to open with the stage's other models."""
        return self._sources.specs() if self._own and self._config is not None else {}

    def sample(self, generator: ModelHandle, iteration: int, episodes: EpisodeSampler | None = None) -> Rollout | None:
        """Replies, or `episodes`, of the policy after `iteration` updates, if a validation is due."""
        due = self._config is not None and iteration % self._config.every == 0
        return self._replies(generator, iteration, episodes) if due else None

    def _replies(self, generator: ModelHandle, version: int, episodes: EpisodeSampler | None) -> Rollout:
        kept = self._stage.config.ledger
        keep = kept.keep != "none" and kept.tokens == "kept"
        sampler = ReplySampler(self._stage, generator, self._sampling) if episodes is None else episodes
        return sampler.sample(EpisodeBatch(self._prompts, self._columns, version, "validation", keep=keep))

    def score(self, models: Mapping[str, ModelHandle], replies: Rollout | None, iteration: int) -> dict[str, float]:
        """Score the replies of `sample`, keep the policy if it is the best so far, and return metrics."""
        if replies is None:
            return {}
        assert self._config is not None
        score, length = self._mean(models, replies, iteration), float(replies.own_tokens().lengths.mean())
        self.best.update(models, iteration, score)
        metrics = {"validation/score": score, "validation/length": length, "validation/best": self.best.state.best}
        return {name: float(value) for name, value in metrics.items()} | {
            "validation/version": float(replies.version.min())
        }

    def _mean(self, models: Mapping[str, ModelHandle], replies: Rollout, iteration: int) -> float:
        ids, messages = replies.response_ids, [messages for messages, _ in self._prompts]
        texts = own_texts(self._tokenizer, replies)
        begun = prompt_tokens(replies, [p for _, p in self._prompts])
        whole = TextBatch.of(begun, [with_end_of_turn(reply, self._stops) for reply in ids])
        read = whole if replies.are_episodes else answer_rows(self._tokenizer, messages, texts, whole)
        requests = self._sources.requests(models, messages, texts, read)
        branches: Callable[[], Scores] | None = None
        if self._sources.branches:
            branches = partial(get, models["policy"].score.remote(read))
        scores = self._sources.scores(
            requests,
            messages,
            texts,
            self._columns,
            branches,
            step=iteration,
            episodes=episode_scores(replies),
            tokens=read,
        )
        return float(torch.nanmean(self._sources.scaled(scores).double()))

    def score_last(self, models: Mapping[str, ModelHandle], version: int, episodes: EpisodeSampler | None) -> None:
        """Score the policy after the last update, which the generator has."""
        with sampling_turn(self._stage.runtime, models["generator"], trained_models(models).values()):
            replies = self._replies(models["generator"], version, episodes)
        self.score(models, replies, version)

    def record(self) -> dict[str, Any]:
        """Facts for the checkpoint, besides the scores."""
        if self._config is None:
            return {}
        return {"scored_by": list(self._sources.weights), "prompts": len(self._prompts)}
