"""Objectives over models in float64, on rows that share prompts: their losses and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.models.families import model
from xray_runtime.cluster.micro_batches import as_tensors
from xray_runtime.data.batch import PairBatch, PolicyBatch, StepTotals, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.methods.common.preference_objectives import DPOObjective
from xray_runtime.methods.dpo.config import DPOConfig
from xray_runtime.methods.ppo.config import PPOStageConfig
from xray_runtime.methods.ppo.objectives import CriticObjective, PPOObjective
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import Objective, training_loss
from xray_runtime.models.reward_objective import RewardObjective

FIRST, SECOND = [5, 9, 7, 42], [5, 9, 8]
PROMPTS = [FIRST, SECOND, FIRST, [3], SECOND, FIRST, FIRST]
"""The prompt of each row: rows of one prompt are not adjacent, and one prompt has a single row."""
REPLIES = [[11, 6, 80], [4], [7, 2, 3], [8, 8], [15, 16], [9], [11, 6, 80]]
"""The reply of each row: two to one prompt have the same length, and two are identical."""
REJECTED = [[12], [4, 5], [7], [8, 9, 10], [2], [1, 1], [3]]
TOTALS = StepTotals(tokens=15.0, rows=7.0, kl_coef=0.1)


def rows_of(objective: Objective) -> TextBatch:
    """Rows with all columns that any objective reads, in float64."""
    rows = TextBatch.of(PROMPTS, REPLIES)
    noise = np.random.default_rng(0).normal(size=(6, 15))
    names = ("old_logprobs", "ref_logprobs", "advantages", "weights", "values", "returns")
    offsets = Ragged.of(REPLIES).offsets
    if isinstance(objective, DPOObjective | RewardObjective):
        rejected, of_pairs = TextBatch.of(PROMPTS, REJECTED).input_ids, noise[:2, :7] - 9
        return rows.as_kind(PairBatch, rejected_ids=rejected, ref_chosen=of_pairs[0], ref_rejected=of_pairs[1])
    columns = zip(names, noise, strict=True)
    made = rows.as_kind(PolicyBatch, **{n: Ragged(column - 4.8 * ("log" in n), offsets) for n, column in columns})
    if not isinstance(objective, PPOObjective) or not objective.config.score_centering:
        return made
    likely = 20 + np.arange(3 * offsets[-1]).reshape(-1, 3) % 50
    tokens = zip(chain(*REPLIES), likely.tolist(), strict=True)
    sets = [sorted({token, *ids[: 1 + ids[0] % 3]}) for token, ids in tokens]
    by_row = np.split(np.array([len(ids) for ids in sets], np.int32), offsets[1:-1])
    return made.with_columns(
        topk_ids=Ragged(np.where(likely % 3 < 2, likely, -1).astype(np.int32), offsets),
        topk_logprobs=Ragged(np.log([0.4, 0.3, 0.1]) + np.zeros_like(likely), offsets),
        kept_counts=Ragged.of(by_row, np.int32),
        kept_ids=Ragged(np.concatenate(sets).astype(np.int32), np.cumsum([0, *map(sum, by_row)])),
    )


def outcome(
    module: HeadedLM, objective: Objective, rows: TextBatch, batches: Sequence[Sequence[int]], shared: bool
) -> tuple[float, list[Tensor]]:
    """Loss and gradients over micro-batches."""
    total = 0.0
    module.zero_grad()
    for batch in batches:
        tensors = as_tensors(rows.take(batch))
        if not shared:
            tensors = tensors.with_columns(alike=None)
        loss, _ = training_loss(module, objective, tensors, TOTALS)
        loss.backward()
        total += loss.item()
    return total, [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def exact(family: str = "llama", **sizes: Any) -> Any:
    """A model in float64, with torch's norms for the library's, which round to float32."""
    lm = model(family, **sizes)
    if "num_experts" in sizes:
        lm.set_experts_implementation("eager")  # the others have no float64
    for parent in list(lm.modules()):
        for name, norm in parent.named_children():
            if type(norm).__name__.endswith("RMSNorm"):
                own = torch.nn.RMSNorm(norm.weight.shape, norm.variance_epsilon, dtype=torch.float64)
                own.weight = norm.weight
                setattr(parent, name, own)
    return lm


def headed(family: str = "llama", sizes: Mapping[str, Any] = {}, **options: Any) -> HeadedLM:
    module = HeadedLM(exact(family, **sizes), scalar_head=True, **options).double()
    assert module.scalar is not None
    torch.nn.init.constant_(module.scalar.weight, 0.1)
    return module


def assert_equal_outcomes(
    found: tuple[float, list[Tensor]], expected: tuple[float, list[Tensor]], rel: float = 1e-12
) -> None:
    assert found[0] == pytest.approx(expected[0], rel=rel)
    assert len(found[1]) == len(expected[1]) > 10
    for ours, theirs in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=rel * float(theirs.abs().max()) + 1e-15)


OBJECTIVES: dict[str, Callable[[], Objective]] = {
    "policy": lambda: PPOObjective(PPOStageConfig(entropy_coef=0.1, kl={"place": "loss"})),
    "centred": lambda: PPOObjective(PPOStageConfig(score_centering=True, top_p=0.9, entropy_coef=0.1)),
    "critic": lambda: CriticObjective(PPOStageConfig()),
    "pairs": lambda: DPOObjective(DPOConfig()),
    "reward": RewardObjective,
}
