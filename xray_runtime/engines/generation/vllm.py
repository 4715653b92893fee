"""Generation by vLLM."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.engines.generation.sampling import Place, Reply, Sampling
from xray_runtime.weights.versioned import Tensors

PREFILL_TOKENS = 8192
"""Prompt tokens vLLM takes in at a time."""


def environment(runtime: RuntimeConfig, device: str) -> dict[str, str]:
    """Settings that vLLM reads at import."""
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(runtime.generator_memory_gib))),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if device == "cpu":
        # Some of vLLM's samplers compile themselves even in eager mode: 15 s at the first call, for nothing here.
        settings["TORCH_COMPILE_DISABLE"] = "1"
        settings["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return settings


def load_vllm(runtime: RuntimeConfig, device: str) -> Any:
    """The library, imported with the settings that it reads at import."""
    os.environ |= environment(runtime, device)
    import vllm
    import vllm.entrypoints.llm

    return vllm


class VLLMSampler:
    """One vLLM engine in this process, or this rank of one that is split over several (tensor parallel).

    Each rank runs a scheduler of its own on the same requests ("external launcher"), so what a call sends to one rank
    it sends to all.
    """

    def __init__(self, directory: Path, max_length: int, runtime: RuntimeConfig, place: Place) -> None:
        device = place.device
        self._vllm = load_vllm(runtime, device)
        from vllm.config.weight_transfer import WeightTransferConfig

        from xray_runtime.weights import vllm_transfer

        vllm_transfer.register()
        options: dict[str, Any] = {} if device == "cpu" else {"gpu_memory_utilization": runtime.gpu_memory_fraction}
        self._sleeps, self._asleep = runtime.generator_sleeps, False
        if self._sleeps:
            options["enable_sleep_mode"] = True
        if place.world_size > 1:
            _launch(place)
            options |= {
                "tensor_parallel_size": place.world_size,
                "distributed_executor_backend": "external_launcher",
            }
        self._llm = self._vllm.LLM(
            str(directory),
            skip_tokenizer_init=True,
            # Nothing that is a pickle, no code that lies beside the weights.
            load_format="safetensors",
            trust_remote_code=False,
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
        if place.world_size > 1:
            _unlink_shared_memory()
        self._llm.init_weight_transfer_engine({"init_info": {}})
        self._sleep()

    def _sleep(self) -> None:
        # Level 1: the weights wait in host memory, the KV cache is given up.
        if self._sleeps and not self._asleep:
            self._llm.sleep(level=1)
            self._asleep = True

    def _wake_up(self) -> None:
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False

    def sample(self, prompts: list[list[int]], seeds: list[int], sampling: Sampling) -> list[Reply]:
        params = [
            self._vllm.SamplingParams(
                max_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k or 0,
                min_p=sampling.min_p,
                repetition_penalty=sampling.repetition_penalty,
                seed=seed,
                logprobs=0,
                detokenize=False,
                stop_token_ids=list(sampling.stop_token_ids),
            )
            for seed in seeds
        ]
        self._wake_up()
        outputs = self._llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        self._sleep()
        replies = []
        for output in outputs:
            ids = list(output.outputs[0].token_ids)
            steps = zip(output.outputs[0].logprobs, ids, strict=True)
            replies.append(Reply(ids, [step[token].logprob for step, token in steps]))
        return replies

    def layers_of(self, names: set[str]) -> set[str]:
        together: set[str] = self._llm.collective_rpc(_layers_of, args=(names,))[0]
        return together

    def write(self, tensors: Tensors, version: int) -> None:
        self.receive("start", {}, version)
        self._llm.update_weights({"update_info": {"tensors": tensors}})
        self.receive("finish", {}, version)

    def receive(self, step: str, info: dict[str, Any], version: int) -> None:
        """One step of a transfer that a trainer drives from GPU to GPU: `init`, `start`, `update`, …, `finish`.

        One that slept stays awake afterwards: a rollout is next.
        """
        self._wake_up()
        if step == "init":
            self._llm.init_weight_transfer_engine({"init_info": info})
        elif step == "start":
            # After an error in `finish` vLLM would never start another session.
            self._llm.collective_rpc(_close_session)
            self._llm.start_weight_update()
        elif step == "update":
            self._llm.update_weights({"update_info": {"direct": info}})
        else:
            self._llm.finish_weight_update(str(version))


def _layers_of(worker: Any, names: set[str]) -> set[str]:
    together: set[str] = worker.weight_transfer_engine.layers_of(names)
    return together


def _close_session(worker: Any) -> None:
    worker._weight_update_active = False


def _launch(place: Place) -> None:
    """Where vLLM's ranks meet: at our address, not at one from the environment.

    vLLM names its shared memory after that address (after nothing, where it comes from the environment: two models on
    one machine collide), and what a killed rank leaves in /dev/shm would stop the next one. A name that differs from
    rank to rank makes it use gloo instead.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    os.environ |= {"RANK": str(place.rank), "WORLD_SIZE": str(place.world_size)}
    address = f"tcp://{place.host}:{place.port}?name={place.rank}"
    local_rank = 0 if place.device == "cuda" else place.rank
    ExecutorWithExternalLauncher._distributed_args = lambda self: (address, place.rank, local_rank)


def _unlink_shared_memory() -> None:
    """Let go of the name of vLLM's message ring, which every rank has open now: it then goes with the processes."""
    from vllm.distributed.parallel_state import get_tp_group

    ring = get_tp_group().mq_broadcaster
    if ring is not None and ring.buffer.is_creator:
        ring.buffer.shared_memory.unlink()
        ring.buffer.is_creator = False
