"""Two prompts with four replies each, and a method on a real tiny model that has moved a little since it sampled."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.unit.methods.ppo.parts import Columns, taken, typed
from xray_runtime.data.batch import PolicyBatch, StepTotals, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.methods.ppo.config import PPOStageConfig
from xray_runtime.methods.ppo.experience import build_experience
from xray_runtime.methods.ppo.functions import RowFacts
from xray_runtime.methods.ppo.objectives import PPOObjective
from xray_runtime.methods.ppo.published import METHODS
from xray_runtime.methods.ppo.update import step_totals
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import training_loss

MakeLM = Callable[[int], Any]
NAN = math.nan
KL_COEF = 0.1
REPLIES = [[42, 11, 1], [3, 1], [25, 60, 61, 1], [7, 1], [9, 9, 1], [80, 81, 82, 83], [1], [30, 31, 1]]
"""The first four to one prompt, the others to another; the sixth was cut off."""
PROMPTS = [[5, 9, 7]] * 4 + [[8, 100]] * 4
REWARDS = [1.0, 0.25, -0.5, 0.75, 0.0, 2.0, -1.0, 0.5]


def of_one_source(rewards: Tensor) -> RowFacts:
    return RowFacts(sources={"rewards": rewards}, weights={"rewards": 1.0})


class Setting:
    """A method on a model that has moved a little since it sampled."""

    def __init__(self, make_lm: MakeLM, method: str, **fields: Any) -> None:
        samples = 4 if "samples_per_prompt" in METHODS[method] and method != "reinforce++" else 1
        given = {"prompts_per_iteration": 8 // samples, "samples_per_prompt": samples, "minibatch_size": 8}
        given |= {"max_new_tokens": 5, "reward_scaling": "none", "entropy_coef": 0.01}
        if "observation_coef" in METHODS[method]:
            given["environment"] = {"path": "module:Environment"}
        self.config = PPOStageConfig.model_validate(given | {"method": method} | fields)
        self.has_critic = self.config.critic_in_use == "shared"
        self.module = HeadedLM(make_lm(1), scalar_head=self.has_critic).double()
        if self.module.scalar is not None:
            torch.nn.init.constant_(self.module.scalar.weight, 0.1)

    def rollout(self, seed: int = 0) -> tuple[Columns, Columns, Columns]:
        """(rows, rollout, scores): log-probabilities near the model's own, so that few ratios are clipped."""
        rows = TextBatch.of(PROMPTS, REPLIES)
        with torch.no_grad():
            own = PPOObjective(self.config).score(self.module, as_tensors(rows))
        logprobs, draws = own.logprobs.values.numpy(), np.random.default_rng(seed)
        offsets = np.cumsum([0, *map(len, REPLIES)])

        def near(scale: float) -> Ragged:
            return Ragged((logprobs + scale * draws.normal(size=len(logprobs))).astype(np.float32), offsets)

        scores: Columns = {"logprobs": near(1e-4), "ref_logprobs": near(0.3)}
        if self.has_critic:
            scores |= {"values": Ragged(near(0.0).values * 0.1, offsets), "final_values": np.zeros(8, np.float32)}
        extra: Columns = {}
        if self.config.environment is not None:
            # The second of four tokens was read.
            read = [np.arange(len(reply)) == (1 if len(reply) == 4 else 9) for reply in REPLIES]
            extra = {
                "response_mask": Ragged.of([~row for row in read], np.bool_),
                "turn_rewards": Ragged(near(0.0).values * 0, offsets),
            }
        ended = np.array([reply[-1] == 1 for reply in REPLIES])
        rows = rows.with_columns(id=np.arange(8))
        return rows.columns(), {"rollout_logprobs": near(0.05), "ended": ended, **extra}, scores

    def experience(self, rewards: Sequence[float], order: Sequence[int] = range(8)) -> tuple[PolicyBatch, int]:
        """(what the update reads, its tokens) of the replies in this order."""
        parts = (taken(part, list(order)) for part in self.rollout())
        scaled = torch.tensor([rewards[i] for i in order])
        found = build_experience(self.config, *typed(*parts), scaled, KL_COEF, facts=of_one_source(scaled))
        return found.rows, found.num_tokens

    def gradient(self, rows: PolicyBatch, totals: StepTotals, parts: Sequence[Sequence[int]] | None = None) -> Tensor:
        """Of the policy's loss, summed over micro-batches, all weights in one vector."""
        self.module.zero_grad()
        for part in parts or [range(len(rows))]:
            loss, _ = training_loss(self.module, PPOObjective(self.config), as_tensors(rows.take(list(part))), totals)
            loss.backward()
        found = [p.grad.flatten() for p in self.module.parameters() if p.grad is not None]
        return torch.cat(found).clone()

    def of(self, rewards: Sequence[float], order: Sequence[int] = range(8), parts: Any = None) -> Tensor:
        """The gradient of these rewards."""
        rows, tokens = self.experience(rewards, order)
        totals = step_totals(self.config, rows, KL_COEF)
        assert (totals.tokens, totals.rows) == (tokens, len(rows))
        return self.gradient(rows, totals, parts)


def as_tensors(rows: TextBatch) -> TextBatch[Tensor]:
    def tensor(array: np.ndarray) -> Tensor:
        found = torch.from_numpy(array)
        return found.double() if found.is_floating_point() else found

    return rows.map(tensor)
