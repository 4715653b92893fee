"""NaN and infinite numbers: which stage and step they occur in.

Non-finite scores always fail the stage: a WholeModel rejects them, and `naming` adds the step to the error. Optimizer
steps may be skipped (`steps.SkippedSteps`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from xray_runtime.data.ragged import Ragged, non_finite
from xray_runtime.data.routes import unknown
from xray_runtime.kernel.errors import NonFiniteError, root_cause

if TYPE_CHECKING:
    from xray_runtime.data.batch import ReplyBatch
    from xray_runtime.engines.sampling import Sampling

log = logging.getLogger(__name__)

ROUNDING = 1e-4
"""A generator's log-probability may exceed 0 by this much, in nats."""


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Prefix the message of a NonFiniteError from inside with `where`, the stage and its step."""
    try:
        yield
    except Exception as error:
        cause = root_cause(error)
        if isinstance(cause, NonFiniteError) and not str(cause).startswith(where):
            raise NonFiniteError(f"{where}: {cause}") from error
        raise


def check_rollout(sampled: ReplyBatch, num_prompts: int, sampling: Sampling) -> None:
    """Reject answers of a generator that it cannot have sampled for `num_prompts` prompts.

    Raises:
        NonFiniteError: a log-probability is NaN or infinite.
        RuntimeError: a reply is missing, empty, too long, or has an impossible token, log-probability or route.
    """
    ids, logprobs, num_ended = sampled.response_ids, sampled.rollout_logprobs, len(sampled.ended)
    wrong = non_finite({"rollout_logprobs": logprobs})
    if wrong is not None:
        raise NonFiniteError(f"the rollout: {wrong} are not finite")
    lengths = ids.lengths
    faults = {
        f"{len(ids)} replies to {num_prompts} prompts": len(ids) != num_prompts or num_ended != num_prompts,
        "tokens and log-probabilities differ in number": not np.array_equal(ids.offsets, logprobs.offsets),
        f"a reply of {lengths.min(initial=1)} tokens": lengths.min(initial=1) < 1,
        f"a reply of {lengths.max(initial=0)} tokens, where max_new_tokens = {sampling.max_new_tokens}": (
            lengths.max(initial=0) > sampling.max_new_tokens
        ),
        "a token below 0": bool((ids.values < 0).any()),
        "a log-probability above 0": bool((logprobs.values > ROUNDING).any()),
    }
    if sampling.routes:
        faults |= _route_faults(sampled)
    if sampling.top_logprobs:
        faults |= {
            "likeliest tokens and replies differ in number": not _same_rows(sampled.topk_ids, ids),
            "a likeliest token's log-probability is above 0": bool((sampled.topk_logprobs.values > ROUNDING).any()),
        }
    if sampling.kept:
        faults |= _kept_faults(sampled)
    fault_found = next((fault for fault, present in faults.items() if present), None)
    if fault_found is not None:
        raise RuntimeError(f"the rollout is corrupt: {fault_found}")


def _same_rows(one: Ragged, other: Ragged) -> bool:
    return np.array_equal(one.offsets, other.offsets)


def _kept_faults(sampled: ReplyBatch) -> dict[str, bool]:
    counts, kept, ids = sampled.kept_counts, sampled.kept_ids.values, sampled.response_ids
    if not _same_rows(counts, ids) or counts.values.sum() != len(kept):
        return {"kept sets and replies differ in number": True}
    places = np.repeat(np.arange(len(counts.values)), counts.values)
    found = np.bincount(places, weights=kept == ids.values[places], minlength=len(counts.values))
    return {"a token is not in its kept set": bool((found != 1).any())}


def _route_faults(sampled: ReplyBatch) -> dict[str, bool]:
    ids, weights = sampled.route_ids, sampled.route_weights
    last = ids.offsets[1:] - 1
    known = np.delete(ids.values, last, axis=0)
    in_order = np.sort(known, axis=-1)
    return {
        "routes and replies differ in number": len(ids) != len(sampled.response_ids),
        "routes end before the reply": bool((ids.lengths <= sampled.response_ids.lengths).any()),
        "routes and their weights differ in number": ids.values.shape != weights.values.shape,
        "an expert is unknown, or chosen twice by a token": bool(
            (known == unknown(ids.values.dtype)).any() or (in_order[..., 1:] == in_order[..., :-1]).any()
        ),
        "a route's weight is not finite": not np.isfinite(weights.values).all(),
    }
