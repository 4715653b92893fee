"""The path of one reply to its gradient: its losses, token by token, and its share of each optimizer step's gradient.

Nothing but calls that every trainer has are used, so the numbers are those of the engine that trained, however it
shards the model. Before an optimizer step on a minibatch with the reply, the same step is made twice from the same
state, with all other replies masked out and with this one masked out; then the state is put back. A loss never couples
two replies, so the gradient g of the step is g₁ + g₂, and from their norms

    cos(g₁, g) = (|g₁|² + |g|² − |g₂|²) / (2 |g₁| |g|)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from xray_runtime.cluster.micro_batches import as_tensors
from xray_runtime.cluster.protocols import ModelHandle, get
from xray_runtime.data.batch import PolicyBatch, Scores, StepTotals, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.methods.common.sampling.agent_rows import ID_STEP
from xray_runtime.methods.ppo.objectives import CANDIDATES, OBSERVATIONS, PPOObjective
from xray_runtime.models.objectives import Predictions
from xray_runtime.trust.iteration.updates import GRAD_NORM, UpdateNumbers

LOSSES = {
    "PolicyGradient": "policy gradient",
    "EntropyBonus": "entropy bonus",
    "KLToReference": "KL to the reference",
    "ValueRegression": "value",
}
"""Component of the loss → its name for people; others have their own."""


@dataclass
class SampleStep:
    """An optimizer step that learned from the reply."""

    number: int
    """In the iteration, from 0."""
    rows: int
    """Replies in its minibatch."""
    lr: float
    logprobs: list[float]
    """Those of the reply's tokens, before the step."""
    old_logprobs: list[float]
    """Where the ratio is 1."""
    losses: dict[str, list[float]]
    """Component of the loss → each token's part of the step's loss; empty where the loss also reads other tokens."""
    norm: float | None
    """The norm of the reply's own gradient; None: it cannot be told from the others'."""
    others_norm: float | None
    """The norm of the gradient of all others."""
    whole_norm: float = float("nan")
    """The norm of the step's gradient, before clipping."""

    @property
    def loss(self) -> float:
        """The reply's part of the step's loss."""
        return sum(map(sum, self.losses.values()))

    @property
    def cosine(self) -> float | None:
        """The cosine of the angle between the reply's gradient and the step's."""
        if self.norm is None or self.others_norm is None:
            return None
        return cosine(self.norm, self.others_norm, self.whole_norm)

    @property
    def share(self) -> float | None:
        """The part of the step's gradient, along itself, that is the reply's."""
        return None if self.cosine is None or self.norm is None else self.cosine * self.norm / self.whole_norm


def cosine(part: float, rest: float, whole: float) -> float | None:
    """The cosine of the angle between g₁ and g₁ + g₂, from the norms of g₁, g₂ and both; None where one is 0."""
    if not part or not whole:
        return None
    return max(-1.0, min(1.0, (part**2 + whole**2 - rest**2) / (2 * part * whole)))


class SamplePath:
    """Follows the reply in a row through the optimizer steps of the policy."""

    def __init__(self, row: int, scratch: Path) -> None:
        self.row, self._scratch = row, scratch
        self.policy: ModelHandle
        self.objective: PPOObjective
        self.steps: list[SampleStep] = []

    def before(self, number: int, rows: TextBatch, totals: StepTotals, lr: float) -> None:
        """Compute what the reply gives to the step that comes next."""
        assert isinstance(rows, PolicyBatch)
        replies = rows.id % ID_STEP  # the branches of an agent's episode are rows of their own
        own = replies == self.row
        if not own.any():
            return
        scores = get(self.policy.score.remote(rows))
        places = np.flatnonzero(own)
        mine, scored = rows.take(places), scores.take(places)
        norm, others = (None, None) if OBSERVATIONS in totals.counts else self._norms(rows, own, totals, lr)
        anchor = mine.old_logprobs if "old_logprobs" in mine else mine.rollout_logprobs
        self.steps.append(
            SampleStep(
                number=number,
                rows=len(np.unique(replies)),
                lr=lr,
                logprobs=scored.logprobs.values.tolist(),
                old_logprobs=anchor.values.tolist(),
                losses=token_losses(self.objective, mine, scored, totals),
                norm=norm,
                others_norm=others,
            )
        )

    def end(self, update: UpdateNumbers) -> None:
        """Take the norms of the whole steps."""
        for step in self.steps:
            step.whole_norm = float(update.steps["policy"][step.number][GRAD_NORM])

    def _norms(self, rows: PolicyBatch, own: np.ndarray, totals: StepTotals, lr: float) -> tuple[float, float]:
        """(norm of the gradient of the reply's rows alone, that of all others)."""
        get(self.policy.save_state.remote(self._scratch))
        norms = []
        for counted in (own, ~own):
            step = get(self.policy.train.remote(only(rows, counted), totals, lr))
            norms.append(step[GRAD_NORM])
            get(self.policy.load_state.remote(self._scratch))
        return norms[0], norms[1]


def only(rows: PolicyBatch, counted: np.ndarray) -> PolicyBatch:
    """The rows with a mask by which no token counts but those of `counted` rows [B]."""
    like = rows.advantages
    mask = rows.response_mask.values if "response_mask" in rows else np.ones(len(like.values), bool)
    return rows.with_columns(response_mask=Ragged(mask & np.repeat(counted, like.lengths), like.offsets))


def token_losses(
    objective: PPOObjective, rows: PolicyBatch, scores: Scores, totals: StepTotals
) -> dict[str, list[float]]:
    """Component of the loss → what each token of `rows` adds to the loss of a step, from the policy's `scores`."""
    if any(name in rows for name in CANDIDATES):
        return {}
    module: Any = SimpleNamespace(scalar="values" in scores or None)
    forward = objective.forward(module, as_tensors(rows))
    tensors: Any = as_tensors(scores)  # type: ignore[arg-type]
    # All that the components read of a forward pass; of the hidden states, their type.
    predicted = Predictions(tensors.logprobs.values, tensors.entropy.values, None, None)
    given = {"_predicted": predicted, "hidden": predicted.logprobs}
    vars(forward).update(given | ({"values": tensors.values.values} if "values" in scores else {}))
    found = {}
    for component in objective.components(module):
        terms, coef = component.terms(forward, totals), component.coef(totals)
        if coef:
            weighted = terms.values if terms.weights is None else terms.values * terms.weights
            name = type(component).__name__
            found[LOSSES.get(name, name)] = (coef * weighted / component.count(totals)).tolist()
    return found
