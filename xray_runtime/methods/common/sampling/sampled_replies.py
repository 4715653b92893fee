"""Single replies to prompts: for evaluations, benchmarks and preferences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xray_runtime.cluster.protocols import ModelHandle, get
from xray_runtime.data.batch import PromptBatch, Rollout
from xray_runtime.data.ragged import Ragged
from xray_runtime.engines.sampling import Sampling
from xray_runtime.kernel.seeding import derive_seed
from xray_runtime.methods.common.sampling.episode import EpisodeBatch
from xray_runtime.models.causal_lm import stops_of

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.data.tokenizer import Tokenizer
    from xray_runtime.engines.sampling_config import SamplingConfig


def sampling_of(config: SamplingConfig, model: Path, tokenizer: Tokenizer) -> Sampling:
    """The sampling parameters of `config` for the checkpoint `model` with its tokenizer."""
    return Sampling.of(config, stops_of(model, tokenizer), tokenizer.pad_token_id)


def prompt_rows(stage: Stage[Any, Any], prompts: Sequence[Sequence[int]], *purpose: Any, first: int = 0) -> PromptBatch:
    """Prompts for a generator; a reply's seed derives from `purpose` and its number, counted from `first`."""
    seeds = [derive_seed(stage.seed, stage.name, *purpose, first + row) for row in range(len(prompts))]
    return PromptBatch(input_ids=Ragged.of(prompts), seed=np.array(seeds))


class ReplySampler:
    """Samples one reply to each prompt, where a stage has no environment. A seed depends on the purpose and the row
    alone, not on the model."""

    def __init__(self, stage: Stage[Any, Any], generator: ModelHandle, sampling: Sampling) -> None:
        self._stage, self._generator, self._sampling = stage, generator, sampling

    def sample(self, batch: EpisodeBatch) -> Rollout:
        assert batch.version is not None
        rows = prompt_rows(self._stage, [ids for _, ids in batch.prompts], batch.purpose, first=batch.first_row)
        answer = get(self._generator.generate.remote(rows, self._sampling, batch.version))
        count = len(rows.seed)
        version, prompt = np.full(count, batch.version), batch.first_row + np.arange(count)
        return answer.as_kind(Rollout, seed=rows.seed, version=version, prompt=prompt)
