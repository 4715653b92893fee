"""Generation by vLLM: sampled replies with the log-probabilities they were sampled at, at a known weight version."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xray_runtime.config import RuntimeConfig
from xray_runtime.weights.plasma import WeightUpdate, pack, verify

PREFILL_TOKENS = 8192
"""Prompt tokens vLLM takes in at a time."""


class StaleWeightsError(RuntimeError):
    """The generator does not hold the policy version it was asked to generate with."""


@dataclass(frozen=True)
class Sampling:
    """How replies are sampled."""

    max_new_tokens: int
    temperature: float
    eos_token_id: int
    pad_token_id: int


class VLLMGenerator:
    """One vLLM engine in this process.

    Deterministic: each reply has a seed of its own, so it depends neither on its neighbours nor on the batch size.

    Args:
        directory: Hugging Face checkpoint to start from, as weight version 0.
        max_length: longest prompt and reply together, in tokens.
        device: "cpu" or "cuda".
    """

    def __init__(self, directory: Path, max_length: int, device: str, runtime: RuntimeConfig) -> None:
        # vLLM reads its settings from the environment, at import.
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(runtime.generator_memory_gib))),
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
        }
        if device == "cpu":
            # Some of vLLM's samplers compile themselves even in eager mode: 15 s at the first call, for nothing here.
            os.environ["TORCH_COMPILE_DISABLE"] = "1"
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        import vllm
        from vllm.config.weight_transfer import WeightTransferConfig

        from xray_runtime.weights import vllm_transfer

        vllm_transfer.register()
        options: dict[str, Any] = {} if device == "cpu" else {"gpu_memory_utilization": runtime.gpu_memory_fraction}
        self._vllm = vllm
        self._llm = vllm.LLM(
            str(directory),
            skip_tokenizer_init=True,
            dtype="float32" if device == "cpu" else "bfloat16",
            enforce_eager=device == "cpu",
            max_model_len=max_length,
            enable_prefix_caching=False,
            # On CPU vLLM fails on a seeded request whose prompt it has cut in two ("Generator does not use offset").
            enable_chunked_prefill=device != "cpu",
            max_num_batched_tokens=max(PREFILL_TOKENS, max_length),
            logprobs_mode="processed_logprobs",
            weight_transfer_config=WeightTransferConfig(backend=vllm_transfer.BACKEND),
            **options,
        )
        self._llm.init_weight_transfer_engine({"init_info": {}})
        self._llm.update_weight_version("0")
        self._shape, self._max_length = _shape(directory), max_length
        self._broken = False

    def fits(self, directory: Path, max_length: int) -> bool:
        """Whether the checkpoint differs from the one vLLM was started on in its weights alone."""
        return _shape(directory) == self._shape and max_length == self._max_length

    def restart(self, directory: Path) -> None:
        """Hold the weights of `directory` as version 0, as if vLLM had been started on it."""
        from safetensors.torch import load_file

        weights = load_file(directory / "model.safetensors")
        self.load(pack(sorted(weights.items()), version=0))

    @property
    def version(self) -> int:
        """Policy version of the weights in vLLM, as vLLM itself records it."""
        return int(self._llm.get_weight_version())

    def load(self, update: WeightUpdate) -> None:
        """Take over `update`'s weights: all of them, or, where one is damaged, none.

        Raises:
            WeightTransferError: a checksum failed; the generator still holds its old version, whole.
        """
        verify(update)
        self._broken = True
        self._llm.start_weight_update()
        for bucket in update.buckets:
            self._llm.update_weights({"update_info": {"bucket": bucket}})
        self._llm.finish_weight_update(str(update.version))
        self._broken = False

    def generate(
        self, prompts: list[list[int]], seeds: list[int], sampling: Sampling, version: int
    ) -> dict[str, np.ndarray]:
        """Sample one reply a prompt with policy version `version`.

        Returns arrays over B prompts and T = `max_new_tokens`: `response_ids` [B, T] int64 (padded),
        `response_mask` [B, T] bool, `rollout_logprobs` [B, T] float32 (at the sampling temperature), `ended` [B] bool
        (False: cut off at T).

        Raises:
            StaleWeightsError: another version is loaded, or a load failed half-way.
        """
        if self._broken or self.version != version:
            state = "nothing usable (a load failed half-way)" if self._broken else f"version {self.version}"
            raise StaleWeightsError(f"asked to generate with policy version {version}, but the generator holds {state}")
        params = [
            self._vllm.SamplingParams(
                max_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                seed=seed,
                logprobs=0,
                detokenize=False,
                stop_token_ids=[sampling.eos_token_id],
            )
            for seed in seeds
        ]
        outputs = self._llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        shape = (len(prompts), sampling.max_new_tokens)
        ids = np.full(shape, sampling.pad_token_id, dtype=np.int64)
        mask = np.zeros(shape, dtype=bool)
        logprobs = np.zeros(shape, dtype=np.float32)
        ended = np.zeros(shape[0], dtype=bool)
        for row, output in enumerate(outputs):
            reply = output.outputs[0]
            n = len(reply.token_ids)
            ids[row, :n] = reply.token_ids
            mask[row, :n] = True
            logprobs[row, :n] = [step[t].logprob for step, t in zip(reply.logprobs, reply.token_ids, strict=True)]
            ended[row] = n > 0 and reply.token_ids[-1] == sampling.eos_token_id
        return {"response_ids": ids, "response_mask": mask, "rollout_logprobs": logprobs, "ended": ended}


def _shape(directory: Path) -> str:
    return (directory / "config.json").read_text() if (directory / "model.safetensors").is_file() else str(directory)
