"""The rollouts of a PPO stage, from prompts to replies to train on.

With `lag: n` (1 is "one-step-off") the generator samples rollout i + n with version i, the policy after i updates,
while all models score rollout i and the policy learns from it. Version 0 samples the first n + 1 rollouts; every later
one is n updates old, and none is older. Weights never change while a rollout is sampled, so it depends on prompts,
seeds and one version, never on timing; `in_flight_updates` gives that up (`in_flight`). The loss then involves
three policies:

    behaviour   version i − n, in the generator, sampled           `rollout_logprobs`
    proximal    version i, in the trainer, before the update       `old_logprobs`, where the clipped ratio is 1
    current     the policy being updated                           `logprobs`

It is the decoupled objective of Hilton, Cobbe and Schulman (2021, "Batch size-invariance for policy optimization"),
which AReaL (Fu et al. 2025) also uses: the clipped loss against the proximal policy, each token weighted by proximal
over behaviour. The same weights, with the same cap, correct for the generator's kernels (`algorithms.importance`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xray_runtime.cluster.protocols import Local, ModelHandle, Ready, Ref, get, get_all
from xray_runtime.data.batch import REPLAYED, ReplyBatch, Rollout, TextBatch
from xray_runtime.engines.sampling import Sampling
from xray_runtime.methods.common.mismatch import check_mismatch
from xray_runtime.methods.common.sampling.episode import EpisodeBatch, games_of_rows, purpose_of
from xray_runtime.methods.common.sampling.sampled_replies import prompt_rows
from xray_runtime.methods.common.training.finite import check_rollout
from xray_runtime.methods.common.training.prompts import UniquePrompts
from xray_runtime.methods.ppo.curriculum import Drawn, PromptOrder

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.methods.common.sampling.episode_source import EpisodeSampler
    from xray_runtime.methods.ppo.config import PPOConfig
    from xray_runtime.methods.ppo.in_flight import InFlight
    from xray_runtime.methods.ppo.kind import PPOInputs

PROBE_ROWS, PROBE_TOKENS = 8, 4
"""Number and length of a probe's replies. Small, since training and sampling wait for it."""


def num_probe_rows(stage: Stage[PPOConfig, PPOInputs]) -> int:
    """Rows of a comparison of generator and trainer, so that every replica and rank has one."""
    return max(PROBE_ROWS, stage.config.engine.data_parallel, stage.runtime.generator_replicas)


@dataclass(frozen=True)
class PendingRollout:
    version: int
    """Version of the sampling policy: the number of updates before it."""
    prompts: list[int]
    """Prompt number of each reply."""
    answer: Ref[ReplyBatch]
    """A generator's answer, or a whole rollout of episodes or from a snapshot."""
    seeds: np.ndarray | None = None
    """Seed of each reply [B]; None if `answer` is a rollout, which has its own."""
    reasons: list[str] | None = None
    """Why each prompt was drawn; None without a curriculum, and if `answer` has them."""

    def get(self) -> Rollout:
        """Wait for the rollout."""
        answer, count = get(self.answer), len(self.prompts)
        columns = {"version": np.full(count, self.version), "prompt": np.array(self.prompts)}
        if self.reasons is not None:
            columns["drawn"] = np.array(self.reasons, object)
        if isinstance(answer, Rollout):
            return answer.with_columns(**columns)
        return answer.as_kind(Rollout, seed=self.seeds, **columns)


class Rollouts:
    """Rollouts that were requested and not yet trained on.

    Args:
        episodes: plays episodes instead of sampling single replies.
        in_flight: the groups that run across updates, with `in_flight_updates`.
    """

    def __init__(
        self,
        generator: ModelHandle,
        stage: Stage[PPOConfig, PPOInputs],
        sampling: Sampling,
        prompts: UniquePrompts,
        order: PromptOrder,
        episodes: EpisodeSampler | None = None,
        in_flight: InFlight[Any, Any] | None = None,
    ) -> None:
        self._generator, self._stage, self._prompts, self._order = generator, stage, prompts, order
        self._sampling, self._episodes, self._in_flight = sampling, episodes, in_flight
        self._pending: list[PendingRollout] = []

    def request(self, iteration: int) -> None:
        """Start sampling, with policy version `iteration`, all rollouts up to `iteration + lag` that were not requested
        yet."""
        if self._in_flight is not None:
            self._in_flight.request(iteration, self._order.cursor)
            return
        config = self._stage.config
        end = min(iteration + config.lag + 1, config.iterations)
        for number in range(iteration + len(self._pending), end):
            drawn = self._order.take(config.prompts_per_iteration).repeated(config.samples_per_prompt)
            self._pending.append(self._sample(drawn, iteration, purpose_of(0), number))

    def wait(self) -> None:
        """Wait until all requested rollouts are sampled."""
        get_all([rollout.answer for rollout in self._pending])

    def take(self) -> Rollout:
        """Remove and return the oldest requested rollout."""
        if self._in_flight is not None:
            return self._in_flight.take()
        return self._checked(self._pending.pop(0))

    def sample_others(self, iteration: int, attempt: int, count: int) -> Rollout:
        """Sample replies to the next `count` prompts with the policy version of `iteration`, in which there were
        `attempt` calls before."""
        config = self._stage.config
        drawn = self._order.take(count).repeated(config.samples_per_prompt)
        return self._checked(self._sample(drawn, iteration, purpose_of(attempt + 1), iteration))

    def sync(self, policy: ModelHandle, iteration: int) -> tuple[str | None, float | None]:
        """Load version `iteration` of the policy's weights into the generator; returns `LedgerShard.policy` and, with
        `lag`, what `probe` finds, while no part of a reply is before it."""
        lora = self._stage.config.lora
        # A generator begins with the checkpoint, which a policy with rounded matrices is not.
        holds_it = not iteration and (lora is None or lora.quantize is None)
        with nullcontext() if self._in_flight is None else self._in_flight.updating(iteration):
            sent = None if holds_it else get(self._generator.follow.remote(policy, iteration))
            return sent, self.probe(policy, iteration) if self._stage.config.lag else None

    @property
    def dropped(self) -> Sequence[int]:
        """`LedgerShard.dropped` of the last iteration."""
        return () if self._in_flight is None else self._in_flight.dropped

    def metrics(self, rollout: Rollout, iteration: int) -> dict[str, float]:
        """Metrics of an iteration with these episodes, if they are that, or with groups in flight."""
        if self._in_flight is not None:
            return self._in_flight.metrics(rollout, iteration)
        return {} if self._episodes is None else self._episodes.metrics(rollout)

    def probe(self, policy: ModelHandle, version: int, turn: AbstractContextManager[None] | None = None) -> float:
        """Mean |log-probability difference| between generator and policy at `version`, in nats per token.

        Uses the first tokens of a few replies, spread over every replica and rank. A rollout sampled during an update
        cannot be compared: when it arrives, the policy has changed. `turn`: the generator's, where they share GPUs.
        Raises RuntimeError as `check_mismatch`.
        """
        num_rows = num_probe_rows(self._stage)
        prompts = [row % len(self._prompts) for row in range(num_rows)]
        sampling = replace(self._sampling, max_new_tokens=min(PROBE_TOKENS, self._sampling.max_new_tokens))
        with turn or nullcontext():
            replies = self._generate(Drawn(prompts), sampling, version, "probe", version).get()
        check_rollout(replies, num_rows, sampling)
        rows = TextBatch.of([self._prompts[i][1] for i in prompts], replies.response_ids)
        scores = get(policy.score.remote(rows.with_columns(**replies.pick(*REPLAYED))))
        mismatch = float(np.abs(scores.logprobs.values - replies.rollout_logprobs.values).mean())
        check_mismatch(mismatch, self._stage.config.mismatch_limit(self._stage.runtime.device))
        return mismatch

    def _sample(self, drawn: Drawn, version: int, purpose: str, number: int) -> PendingRollout:
        if self._episodes is None:
            return self._generate(drawn, self._sampling, version, purpose, number)
        config, prompts = self._stage.config, drawn.prompts
        contents, group_size = [self._prompts[i] for i in prompts], config.samples_per_prompt
        columns = self._prompts.columns(prompts)
        batch = EpisodeBatch(contents, columns, version, purpose, number, group_size)
        answer: Ref[Rollout] = Local(self._episodes.begin(batch))
        assert config.environment is not None
        of_rows = games_of_rows(len(prompts), group_size, config.environment.rows_an_episode)
        reasons = None if drawn.reasons is None else [drawn.reasons[game] for game in of_rows]
        return PendingRollout(version, [prompts[game] for game in of_rows], answer, reasons=reasons)

    def _generate(self, drawn: Drawn, sampling: Sampling, version: int, purpose: str, number: int) -> PendingRollout:
        rows = prompt_rows(self._stage, [self._prompts[i][1] for i in drawn.prompts], purpose, number)
        replies = self._generator.generate.remote(rows, sampling, version)
        return PendingRollout(version, drawn.prompts, replies, rows.seed, drawn.reasons)

    def _checked(self, pending: PendingRollout) -> Rollout:
        rollout = pending.get()
        if self._episodes is None:  # episodes check each turn
            check_rollout(rollout, len(pending.prompts), self._sampling)
        return rollout

    def save_state(self, directory: Path) -> None:
        """Wait for the pending rollouts and write them: a later attempt does not have the weights that sampled them."""
        for number, rollout in enumerate(self._pending):
            rollout.get().save(directory / f"rollout-{number:03}.safetensors")

    def load_state(self, directory: Path) -> None:
        for path in sorted(directory.glob("rollout-*.safetensors")):
            rollout = Rollout.load(path)
            restored: Ref[ReplyBatch] = Ready(rollout)
            version, prompts = int(rollout.version[0]), rollout.prompt.tolist()
            self._pending.append(PendingRollout(version, prompts, restored))
