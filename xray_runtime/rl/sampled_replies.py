"""Replies to given prompts, batch by batch: for evaluations, benchmarks and preferences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xray_runtime.data.rows import Ragged
from xray_runtime.engines.generation.sampling import Sampling
from xray_runtime.models.causal_lm import stops_of
from xray_runtime.seeding import derive_seed
from xray_runtime.workers.protocols import ModelHandle, get

if TYPE_CHECKING:
    from xray_runtime.config.sampling import SamplingConfig
    from xray_runtime.graph.kind import Stage

GENERATION_BATCH = 512
"""Prompts that a generator is handed at a time."""


def sampling_of(config: SamplingConfig, model: Path, tokenizer: Any) -> Sampling:
    """As `config` says, of the checkpoint `model`, whose tokenizer is given."""
    return Sampling.of(config, stops_of(model, tokenizer), tokenizer.pad_token_id)


def sample_replies(
    generator: ModelHandle,
    stage: Stage[Any, Any],
    sampling: Sampling,
    prompts: Sequence[Sequence[int]],
    version: int = 0,
    done: Callable[[int], None] = lambda count: None,
) -> list[list[int]]:
    """Token ids of one reply a prompt; a row has the same seed whichever model replies.

    Args:
        version: of the weights that `generator` holds.
        done: told how many replies there are.
    """
    replies: list[list[int]] = []
    for start in range(0, len(prompts), GENERATION_BATCH):
        part = prompts[start : start + GENERATION_BATCH]
        seeds = [derive_seed(stage.seed, stage.name, "sample", start + row) for row in range(len(part))]
        rows = {"input_ids": Ragged.of(part), "seed": np.array(seeds)}
        answer = get(generator.generate.remote(rows, sampling, version))
        replies += [reply.tolist() for reply in answer["response_ids"]]
        done(len(replies))
    return replies
