"""Numbers that are NaN or infinite: where a stage meets them, and how many steps it may leave out for them.

An engine refuses an optimizer step whose loss or gradient is not finite, on all ranks alike, before anything moves
(`Engine.step`). Here it is decided what becomes of the stage. Scores that are not finite always fail it: they are
refused where a WholeModel's ranks answer, and named here with the step they belong to.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from xray_runtime.data.rows import Rows, non_finite
from xray_runtime.errors import NonFiniteError, root_cause

if TYPE_CHECKING:
    from xray_runtime.engines.generation.sampling import Sampling
    from xray_runtime.graph.kind import Stage
    from xray_runtime.training.steps import StepStatistics

log = logging.getLogger(__name__)

ROUNDING = 1e-4
"""Nats by which a generator's log-probability may exceed 0."""


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Puts `where`, the stage and its step, before what a NonFiniteError from inside says."""
    try:
        yield
    except Exception as error:
        cause = root_cause(error)
        if isinstance(cause, NonFiniteError) and not str(cause).startswith(where):
            raise NonFiniteError(f"{where}: {cause}") from error
        raise


@dataclass
class SkippedSteps:
    """Optimizer steps of a stage that were left out; the one field is the whole state."""

    count: int = 0

    def took(self, stage: Stage[Any, Any], role: str, step: int, statistics: StepStatistics[Any]) -> bool:
        """Whether the optimizer of `role` made this step; False: its engine refused it, and it may be left out.

        Raises:
            NonFiniteError: it was refused, as `max_skipped_steps` were before.
        """
        wrong = next(statistics.non_finite(), None)
        if wrong is None and math.isfinite(statistics.grad_norm):
            return True
        self.count += 1
        cause = f"its gradient's norm is {statistics.grad_norm}, while its loss is finite on every rank"
        if wrong is not None:
            rank = f" on rank {statistics.refused_by}" if statistics.refused_by is not None else ""
            cause = f"{wrong[0]} is {wrong[1]}{rank}"
        allowed = stage.config.max_skipped_steps
        text = f"{stage.name}, optimizer step {step}: {role!r} did not take it, since {cause}"
        if self.count > allowed:
            raise NonFiniteError(f"{text} (step left out number {self.count}; max_skipped_steps = {allowed})")
        log.warning("%s; left out, number %d of at most %d", text, self.count, allowed)
        return False

    def metrics(self, values: Mapping[str, float]) -> dict[str, float]:
        """The metrics of a step: of one that was left out those that are finite, and how many were."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        return finite | {"training/skipped_steps": float(self.count)}


def check_rollout(sampled: Rows, num_asked: int, sampling: Sampling) -> None:
    """Refuse replies that no generator can have sampled.

    Args:
        sampled: what `Generation.generate` returned.
        num_asked: prompts it was asked.

    Raises:
        NonFiniteError: a log-probability is NaN or infinite.
        RuntimeError: a reply is missing or has no token, more than were asked for, or one that cannot be.
    """
    ids, logprobs = sampled["response_ids"], sampled["rollout_logprobs"]
    wrong = non_finite({"rollout_logprobs": logprobs})
    if wrong is not None:
        raise NonFiniteError(f"the rollout: {wrong} are not finite")
    lengths = ids.lengths
    faults = {
        f"{len(ids)} replies to {num_asked} prompts": len(ids) != num_asked or len(sampled["ended"]) != num_asked,
        "tokens and log-probabilities do not go together": not np.array_equal(ids.offsets, logprobs.offsets),
        f"a reply of {lengths.min(initial=1)} tokens": lengths.min(initial=1) < 1,
        f"a reply of {lengths.max(initial=0)} tokens, where max_new_tokens = {sampling.max_new_tokens}": (
            lengths.max(initial=0) > sampling.max_new_tokens
        ),
        "a token below 0": bool((ids.values < 0).any()),
        "a log-probability above 0": bool((logprobs.values > ROUNDING).any()),
    }
    found = next((fault for fault, present in faults.items() if present), None)
    if found is not None:
        raise RuntimeError(f"the rollout is corrupt: {found}")
