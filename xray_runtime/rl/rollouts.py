"""The rollouts of a PPO stage, from the prompts that are asked to the replies that are trained on.

With `lag: 1` ("one-step-off") the generator samples rollout i + 1 as version i, the policy after i updates, while all
models score rollout i and the policy learns from it. The first two rollouts are version 0's, every other is one update
old. No weights change while one is sampled: it depends on prompts, seeds and one whole version, never on what was
faster. Three policies then meet in the loss:

    behaviour   version i − 1 in the generator, which sampled      `rollout_logprobs`
    proximal    version i in the trainer, before the update        `old_logprobs`, where the clipped ratio is 1
    current     the one that is updated                            `logprobs`

It is the decoupled objective of Hilton, Cobbe and Schulman (2021, "Batch size-invariance for policy optimization"),
which AReaL (Fu et al. 2025) trains with too: the clipped loss against the proximal policy, each token weighted by
proximal over behaviour. Those are the very weights that correct for the generator's kernels, capped alike
(`algorithms.importance`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from xray_runtime.data.rows import Ragged, Rows, load_rows, save_rows
from xray_runtime.data.text_rows import text_rows
from xray_runtime.engines.generation.sampling import Sampling
from xray_runtime.rl.types import Rollout, to_rows
from xray_runtime.seeding import derive_seed
from xray_runtime.training.finite import check_rollout
from xray_runtime.training.prompts import UniquePrompts
from xray_runtime.workers.protocols import Local, ModelHandle, Ready, Ref, get, get_all

if TYPE_CHECKING:
    from xray_runtime.config.ppo import PPOConfig
    from xray_runtime.data.batching import Cursor
    from xray_runtime.graph.inputs import PPOInputs
    from xray_runtime.graph.kind import Stage
    from xray_runtime.rl.episodes import Episodes

PROBE_ROWS, PROBE_TOKENS = 8, 4
"""Replies that a probe asks for, and their length: few, since nothing is sampled and learned meanwhile."""


def purpose_of(round: int) -> str:
    """What a rollout's seeds derive from: round 0 is the first of an iteration, r the r-th of other prompts."""
    return f"resample-{round - 1}" if round else "sample"


@dataclass(frozen=True)
class PendingRollout:
    """A rollout that is sampled, or being sampled."""

    version: int
    """Policy version, the number of updates before it, that samples."""
    prompts: list[int]
    """Which prompt each reply is to."""
    answer: Ref[Rows | Rollout]
    """Rows of a generator, or a rollout of episodes or of a snapshot."""
    seeds: np.ndarray | None = None
    """What each reply of a generator is drawn with [B]; a rollout has them itself."""

    def get(self) -> Rollout:
        """Wait for it."""
        answer, count = get(self.answer), len(self.prompts)
        version, prompt = np.full(count, self.version), np.array(self.prompts)
        if isinstance(answer, Rollout):
            return replace(answer, version=version, prompt=prompt)
        return Rollout.read(answer | {"seed": self.seeds, "version": version, "prompt": prompt})


class Rollouts:
    """Rollouts that are asked for and not yet trained on.

    Args:
        prompts: every prompt.
        cursor: which prompts are next.
        episodes: where replies are turns of a conversation with an environment.
    """

    def __init__(
        self,
        generator: ModelHandle,
        stage: Stage[PPOConfig, PPOInputs],
        sampling: Sampling,
        prompts: UniquePrompts,
        cursor: Cursor,
        episodes: Episodes | None = None,
    ) -> None:
        self._generator, self._stage, self._prompts, self._cursor = generator, stage, prompts, cursor
        self._sampling, self._episodes = sampling, episodes
        self._pending: list[PendingRollout] = []

    def ask(self, iteration: int) -> None:
        """Have all that `iteration` and the `lag` after it train on sampled by policy version `iteration`, as far as it
        was not asked for before."""
        config = self._stage.config
        end = min(iteration + config.lag + 1, config.iterations)
        for number in range(iteration + len(self._pending), end):
            asked = self._cursor.take(config.prompts_per_iteration)
            prompts = [prompt for prompt in asked for _ in range(config.samples_per_prompt)]
            self._pending.append(self._sample(prompts, iteration, purpose_of(0), number))

    def wait(self) -> None:
        """Wait until all that was asked for is sampled."""
        get_all([rollout.answer for rollout in self._pending])

    def take(self) -> Rollout:
        """The rollout that was asked for first."""
        return self._checked(self._pending.pop(0))

    def sample_others(self, iteration: int, attempt: int, count: int) -> Rollout:
        """Replies to the next `count` prompts, by the version that `iteration` samples with.

        Args:
            attempt: how often others were sampled in this iteration.
        """
        config = self._stage.config
        prompts = [prompt for prompt in self._cursor.take(count) for _ in range(config.samples_per_prompt)]
        return self._checked(self._sample(prompts, iteration, purpose_of(attempt + 1), iteration))

    def sync(self, policy: ModelHandle, iteration: int) -> str | None:
        """Have the generator take over the weights of `policy`, version `iteration`; returns `Shard.policy`."""
        return get(self._generator.follow.remote(policy, iteration)) if iteration else None

    def probe(self, policy: ModelHandle, version: int) -> float:
        """Mean |log-probability difference| of generator and policy, nats a token, both at `version`.

        Over the first tokens of some replies, every replica and every rank taking part. A whole rollout that is sampled
        beside an update cannot be compared: when it arrives, the policy is another.
        """
        ranks = self._stage.config.engine.data_parallel, self._stage.runtime.generator_replicas
        num_rows = max(PROBE_ROWS, *ranks)
        asked = [row % len(self._prompts) for row in range(num_rows)]
        sampling = replace(self._sampling, max_new_tokens=min(PROBE_TOKENS, self._sampling.max_new_tokens))
        replies = self._generate(asked, sampling, version, "probe", version).get()
        check_rollout(to_rows(replies), num_rows, sampling)
        scores = get(policy.score.remote(text_rows([self._prompts[i][1] for i in asked], replies.response_ids)))
        return float(np.abs(scores["logprobs"].values - replies.rollout_logprobs.values).mean())

    def _sample(self, prompts: list[int], version: int, purpose: str, number: int) -> PendingRollout:
        if self._episodes is None:
            return self._generate(prompts, self._sampling, version, purpose, number)
        asked, group_size = [self._prompts[i] for i in prompts], self._stage.config.samples_per_prompt
        columns = self._prompts.columns(prompts)
        played: Ref[Rollout] = Local(self._episodes.begin(asked, columns, version, purpose, number, group_size))
        return PendingRollout(version, prompts, played)

    def _generate(
        self, prompts: list[int], sampling: Sampling, version: int, purpose: str, number: int
    ) -> PendingRollout:
        seeds = [derive_seed(self._stage.seed, self._stage.name, purpose, number, row) for row in range(len(prompts))]
        rows: Rows = {"input_ids": Ragged.of(self._prompts[i][1] for i in prompts), "seed": np.array(seeds)}
        replies = self._generator.generate.remote(rows, sampling, version)
        return PendingRollout(version, prompts, replies, rows["seed"])

    def _checked(self, pending: PendingRollout) -> Rollout:
        rollout = pending.get()
        if self._episodes is None:  # each turn of an episode was checked as it came
            check_rollout(to_rows(rollout), len(pending.prompts), self._sampling)
        return rollout

    def save_state(self, directory: Path) -> None:
        """Write what is asked for and not trained on into `directory`, once it is sampled: no later attempt has the
        weights that sample it."""
        for number, rollout in enumerate(self._pending):
            save_rows(directory / f"rollout-{number}.safetensors", to_rows(rollout.get()))

    def load_state(self, directory: Path) -> None:
        """Go on from what `save_state` wrote."""
        for path in sorted(directory.glob("rollout-*.safetensors")):
            rollout = Rollout.read(load_rows(path))
            restored: Ref[Rollout] = Ready(rollout)
            version, prompts = int(rollout.version[0]), rollout.prompt.tolist()
            self._pending.append(PendingRollout(version, prompts, restored))
