"""One rollout ready for updates."""

from __future__ import annotations

from dataclasses import dataclass

from xray_runtime.data.batch import PolicyBatch, Rollout
from xray_runtime.data.ragged import Ragged


@dataclass(frozen=True)
class Experience:
    """One rollout ready for updates."""

    rows: PolicyBatch
    rollout: Rollout
    """The replies that have a reward; likewise `ref_logprobs`."""
    ref_logprobs: Ragged
    num_tokens: int
    """Number of tokens that the policy sampled."""
    reference_kl: float
    """Mean KL of a reply to the reference, by k1, in nats."""
    mismatch: float
    """Mean |log-probability difference| between generator and policy, in nats per token."""
    metrics: dict[str, float]
    max_mismatch: float

    @property
    def num_rows(self) -> int:
        return len(self.rows)
