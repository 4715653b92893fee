"""Replies to given prompts, batch by batch: for evaluations, benchmarks and preferences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xray_runtime.cluster.protocols import ModelHandle, get
from xray_runtime.data.batch import PromptBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.engines.sampling import Sampling
from xray_runtime.kernel.seeding import derive_seed
from xray_runtime.methods.common.sampling.turns import sampling_turn
from xray_runtime.models.causal_lm import stops_of

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.engines.sampling_config import SamplingConfig

GENERATION_BATCH = 512
"""Number of prompts in one call of a generator."""


def sampling_of(config: SamplingConfig, model: Path, tokenizer: Any) -> Sampling:
    """The sampling parameters of `config` for the checkpoint `model` with its tokenizer."""
    return Sampling.of(config, stops_of(model, tokenizer), tokenizer.pad_token_id)


def prompt_rows(stage: Stage[Any, Any], prompts: Sequence[Sequence[int]], *purpose: Any, first: int = 0) -> PromptBatch:
    """Prompts for a generator; a reply's seed derives from `purpose` and its number, counted from `first`."""
    seeds = [derive_seed(stage.seed, stage.name, *purpose, first + row) for row in range(len(prompts))]
    return PromptBatch(input_ids=Ragged.of(prompts), seed=np.array(seeds))


def sample_replies(
    generator: ModelHandle,
    stage: Stage[Any, Any],
    sampling: Sampling,
    prompts: Sequence[Sequence[int]],
    version: int = 0,
    done: Callable[[int], None] = lambda count: None,
) -> list[list[int]]:
    """Token ids of one reply per prompt by the generator's `version`; the seeds do not depend on the model. `done` is
    called with the number of replies so far."""
    replies: list[list[int]] = []
    with sampling_turn(stage.runtime, generator):
        for start in range(0, len(prompts), GENERATION_BATCH):
            rows = prompt_rows(stage, prompts[start : start + GENERATION_BATCH], "sample", first=start)
            answer = get(generator.generate.remote(rows, sampling, version))
            replies += [reply.tolist() for reply in answer.response_ids]
            done(len(replies))
    return replies
