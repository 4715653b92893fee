"""A sampler and the policy version it holds."""

from __future__ import annotations

import bisect
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from xray_runtime.data.batch import ReplyBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.data.routes import unknown
from xray_runtime.data.tokenizer import Tokenizer
from xray_runtime.engines.generator import generator
from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.engines.sampling import EngineRank, Reply, Sampling
from xray_runtime.engines.sync.versioned import VersionedWeights
from xray_runtime.engines.top_tokens import top_columns
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.models.adapter_files import adapter_files
from xray_runtime.models.lora import LoRAConfig
from xray_runtime.models.weight_files import weight_files


class Generation:
    """A sampler and the policy version it holds.

    Args:
        directory: Hugging Face checkpoint to start from, as weight version 0.
        max_length: longest prompt and reply together, in tokens.
        adapter: updates bring an adapter with these fields, and never the checkpoint's own weights.

    Attributes:
        weights: the weights it holds, with their version.
        readings: name of each checkpoint that it read from files and compared with what its trainer published
            (`published_check.check_reader`) → the difference in nats.
    """

    def __init__(
        self,
        directory: Path,
        max_length: int,
        config: GeneratorConfig,
        runtime: RuntimeConfig,
        rank: EngineRank,
        adapter: LoRAConfig | None = None,
    ) -> None:
        self._shape, self._directory = _shape(directory, max_length, config, adapter), directory
        self._sampler = generator(config.engine).sampler(directory, max_length, config, runtime, rank, adapter)
        self.layers_of = self._sampler.layers_of
        # A checkpoint of what was trained on this one has the adapter beside its weights.
        files_in = weight_files if adapter is None else lambda other: {} if other == directory else adapter_files(other)
        self.weights = VersionedWeights(directory, self._sampler.write, self.layers_of, files_in)
        self._config, self._device, self._sleeps = config, rank.device, runtime.generator_sleeps
        self.readings = dict[str, float]()
        self._begin(directory)

    def read_pictures(self, folders: tuple[Path, ...]) -> None:
        """Prompts may have pictures of these folders from now on."""
        if folders:
            self._sampler.read_pictures(self._directory, folders)

    def fits(
        self, directory: Path, max_length: int, config: GeneratorConfig, adapter: LoRAConfig | None = None
    ) -> bool:
        """Whether the checkpoint differs from this engine's first one only in weights that it can replace."""
        return _shape(directory, max_length, config, adapter) == self._shape

    def restart(self, directory: Path, version: int = 0) -> None:
        """Hold the weights of `directory`, which differs only in its weights (or has an adapter for them), as
        `version`."""
        self.weights.restart(directory, version)
        self._begin(directory)

    def _begin(self, directory: Path) -> None:
        """Weights were read from the files of `directory`."""
        self._directory, self._is_unchecked = directory, True
        if not self._sleeps:  # else before the first sample, in its turn on the GPU
            self._check_reading()

    def _check_reading(self) -> None:
        from xray_runtime.models.published_check import check_reader, read_tried

        self._is_unchecked = False
        if self._config.rounds_weights or not self.weights.is_as_read or (tried := read_tried(self._directory)) is None:
            return
        if (found := self._sampler.logprobs(tried.rows)) is not None:
            given = tried, found, self._config.engine, self._config.precision(self._device)
            self.readings[self._directory.name] = check_reader(self._directory, *given)

    def receive(self, step: str, info: dict[str, Any], version: int) -> None:
        """One step of a transfer from GPU to GPU; see `Sampler.receive`."""
        if step == "init":
            self._sampler.receive(step, info, version)
        else:
            run, names = partial(self._sampler.receive, step, info, version), info.get("names", ())
            self.weights.receive(run, version, first=step == "start", last=step == "finish", names=names)

    def wake_up(self) -> None:
        """`Sampler.wake_up`."""
        self._sampler.wake_up()

    def sleep(self, *, synced_next: bool = False) -> None:
        """`Sampler.sleep`; weights that an update brings before the next sample (`synced_next`) are not kept."""
        self._sampler.sleep(drop=synced_next and self.weights.drop())

    def generate(self, prompts: list[list[int]], seeds: list[int], sampling: Sampling, version: int) -> ReplyBatch:
        """Sample one reply a prompt with policy version `version`.

        Log-probabilities are at the sampling temperature. Raises StaleWeightsError: another version is loaded, or a
        load failed midway.
        """
        self.weights.use(version)
        if self._is_unchecked:
            self._check_reading()
        self._sampler.catch_up(self.weights.held, version)
        replies = self._sampler.sample(prompts, seeds, sampling)
        ended = [reply.ended(sampling) for reply in replies]
        if sampling.stop:
            from xray_runtime.models.causal_lm import load_tokenizer

            tokenizer = load_tokenizer(self._directory)
            cut = [up_to_stop(reply, sampling.stop, tokenizer) for reply in replies]
            ended = [before or after is not None for before, after in zip(ended, cut, strict=True)]
            replies = [after or before for before, after in zip(replies, cut, strict=True)]
        answer = ReplyBatch(
            response_ids=Ragged.of(reply.token_ids for reply in replies),
            rollout_logprobs=Ragged.of((reply.logprobs for reply in replies), np.float32),
            ended=np.array(ended),
        )
        if sampling.routes:
            answer = answer.with_columns(**_route_columns(prompts, replies))
        if sampling.reported:
            given = [reply.top for reply in replies], answer.response_ids.lengths.tolist(), sampling.reported
            answer = answer.with_columns(**top_columns(*given, sampling.top_logprobs, kept=sampling.kept))
        return answer


def up_to_stop(reply: Reply, stop: tuple[str, ...], tokenizer: Tokenizer) -> Reply | None:
    """`reply` up to the token that completes one of the texts `stop`; None if it holds none of them.

    Engines sample without a tokenizer, so the rest is sampled and discarded.
    """

    def holds_stop(num_tokens: int) -> bool:
        text = tokenizer.decode(reply.token_ids[:num_tokens], skip_special_tokens=True)
        return any(each in text for each in stop)

    if not holds_stop(len(reply.token_ids)):
        return None
    end = bisect.bisect_left(range(len(reply.token_ids)), True, key=holds_stop)
    return reply.first(end)


def _route_columns(prompts: list[list[int]], replies: list[Reply]) -> dict[str, Ragged]:
    """The routes of prompts with their replies, as columns. Raises RuntimeError: those of a token are missing."""
    routes = [reply.routes for reply in replies]
    lengths = [len(prompt) + len(reply.token_ids) for prompt, reply in zip(prompts, replies, strict=True)]
    known = [found for found in routes if found is not None]
    if [len(found.ids) + 1 for found in known] != lengths:
        raise RuntimeError("the generator did not return the experts of every token")
    offsets = np.cumsum([0, *lengths], dtype=np.int64)

    def column(rows: list[np.ndarray], last: int) -> Ragged:
        end = np.full_like(rows[0][:1], last)
        return Ragged(np.concatenate([part for row in rows for part in (row, end)]), offsets)

    ids = [found.ids for found in known]
    return {
        "route_ids": column(ids, unknown(ids[0].dtype)),
        "route_weights": column([found.weights for found in known], 0),
    }


def _shape(directory: Path, max_length: int, config: GeneratorConfig, adapter: LoRAConfig | None) -> tuple[object, ...]:
    names = sorted(weight_files(directory))
    if not names or adapter is not None:
        return directory, max_length, config, adapter
    return (directory / "config.json").read_text(), names, max_length, config
