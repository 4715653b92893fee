"""Generation by vLLM."""

from __future__ import annotations

import math
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from xray_runtime.engines.generators.vllm.loading import load_vllm
from xray_runtime.engines.sampling import EngineRank, Reply, Sampler, Sampling
from xray_runtime.engines.sampling_config import MOST_REPORTED
from xray_runtime.engines.sync.versioned import Tensors
from xray_runtime.engines.top_tokens import TopTokens
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.processes import return_pages
from xray_runtime.kernel.signs import part_done
from xray_runtime.models.family import Heads, family_of

if TYPE_CHECKING:
    from xray_runtime.engines.generators.vllm.routes import RecordedRequests

PREFILL_TOKENS = 8192
"""Prompt tokens that vLLM processes at a time."""
SEQUENCES = 256
"""Replies that vLLM samples at a time on CPU."""
MEMORY = WEIGHTS, KV_CACHE = "weights", "kv_cache"
"""Names of the memory that vLLM frees while it sleeps."""
BLOCK_TOKENS = 32
"""Tokens in a block of the KV cache, the smallest number that vLLM's kernels for CPU accept. Only whole blocks of a
prompt can be shared."""


def engine_options(directory: Path, max_length: int, runtime: RuntimeConfig, rank: EngineRank) -> dict[str, Any]:
    """Options of `vllm.LLM` that depend on the device and on the number of ranks."""
    on_cpu = rank.device == "cpu"
    options: dict[str, Any] = {
        "dtype": "float32" if on_cpu else "bfloat16",
        # CUDA graphs, on GPUs.
        "enforce_eager": on_cpu,
        # On CPU vLLM fails on a seeded request whose prompt it has cut in two ("Generator does not use offset").
        "enable_chunked_prefill": not on_cpu,
        # On CPU, replies and log-probabilities stay the same to the bit. vLLM's kernels for CUDA do not promise that.
        "enable_prefix_caching": on_cpu or not runtime.reproducible,
    }
    if on_cpu:
        cache = kv_cache_bytes(directory, max_length, runtime, rank.world_size)
        options |= {"block_size": BLOCK_TOKENS, "max_num_seqs": SEQUENCES, "kv_cache_memory_bytes": cache}
    else:
        options["gpu_memory_utilization"] = runtime.gpu_memory_fraction
        if runtime.max_num_seqs is not None:
            options["max_num_seqs"] = runtime.max_num_seqs
    if runtime.generator_sleeps:
        options["enable_sleep_mode"] = True
    if rank.world_size > 1:
        options |= {
            "tensor_parallel_size": rank.world_size,
            "distributed_executor_backend": "external_launcher",
            # It looks for its peers among the visible devices, and every Workhorse sees only its own.
            "disable_custom_all_reduce": True,
        }
    return options


def model_options(directory: Path, max_length: int, runtime: RuntimeConfig, rank: EngineRank) -> dict[str, Any]:
    """`engine_options`, and those with which vLLM computes every model as we need it."""
    options = engine_options(directory, max_length, runtime, rank)
    if options["enable_prefix_caching"] and keeps_states(directory):
        # vLLM keeps states at block ends for this only if it may cut prompts there.
        options["enable_prefix_caching"] = False
    return options | {
        "skip_tokenizer_init": True,
        # No pickles, and no code from the checkpoint.
        "load_format": "safetensors",
        "trust_remote_code": False,
        "max_model_len": max_length,
        "max_num_batched_tokens": max(PREFILL_TOKENS, max_length),
        "logprobs_mode": "processed_logprobs",
        # Servers also count the sampled token.
        "max_logprobs": MOST_REPORTED + 1,
    }


def kv_cache_bytes(directory: Path, max_length: int, runtime: RuntimeConfig, world_size: int = 1) -> int:
    """Size of a rank's KV cache on CPU, in float32: room for all sequences at full length and for as many tokens of
    finished ones, whose prefixes later turns find again; at most `runtime.generator_memory_gib`.

    A larger cache would cost time: its pages are fresh memory in every rollout, and a reset visits every block.
    """
    from vllm.transformers_utils.config import get_config

    config = get_config(directory, trust_remote_code=False).get_text_config()
    heads = Heads.of(config)
    token_bytes: int = 2 * 4 * config.num_hidden_layers * math.ceil(heads.keys / world_size) * heads.size
    blocks = 2 * SEQUENCES * math.ceil(max_length / BLOCK_TOKENS)
    return min(blocks * BLOCK_TOKENS * token_bytes, round(runtime.generator_memory_gib * 2**30))


def allowed_rank(rank: int) -> int:
    """The smallest `max_lora_rank` of vLLM for adapters of this rank."""
    from vllm.config.lora import MaxLoRARanks

    allowed: tuple[int, ...] = get_args(MaxLoRARanks)
    return min(most for most in allowed if most >= rank)


def keeps_states(directory: Path) -> bool:
    """Whether the model has layers with a state of the whole prefix (Mamba's, …) instead of keys and values."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.transformers_utils.config import get_config

    # Families that were tried have attention alone.
    if "vllm" in family_of(get_config(directory, trust_remote_code=False).model_type).tried:
        return False
    args = EngineArgs(str(directory), skip_tokenizer_init=True, trust_remote_code=False, load_format="safetensors")
    config = args.create_model_config()
    return bool(config.is_hybrid or config.is_attention_free or config.has_inner_state)


class VLLMSampler(Sampler):
    """One vLLM engine in this process, or one tensor-parallel rank of it.

    Each rank schedules the same requests by itself ("external launcher"), so every call goes to all ranks.
    """

    _adapter: Any = None
    """vLLM's request for the adapter in use."""

    def __init__(
        self, directory: Path, max_length: int, runtime: RuntimeConfig, rank: EngineRank, **options: Any
    ) -> None:
        device = rank.device
        self._vllm = load_vllm(device, reproducible=runtime.reproducible)
        from vllm.config.weight_transfer import WeightTransferConfig

        from xray_runtime.engines.generators.vllm import transfer

        transfer.register()
        self._sleeps, self._stays_awake, self._on_cpu = runtime.generator_sleeps, False, device == "cpu"
        self._asleep: set[str] = set()
        """Which of vLLM's `MEMORY` is freed."""
        if rank.world_size > 1:
            _launch(rank)
        self._llm = self._vllm.LLM(
            str(directory),
            weight_transfer_config=WeightTransferConfig(backend=transfer.BACKEND),
            **model_options(directory, max_length, runtime, rank) | options,
        )
        if rank.world_size > 1:
            _unlink_shared_memory()
        self._llm.init_weight_transfer_engine({"init_info": {}})
        self._count_steps()
        self.sleep()

    def _count_steps(self) -> None:
        engine: Any = self._llm.llm_engine
        step = engine.step

        def counted() -> Any:
            part_done()
            return step()

        engine.step = counted

    def sleep(self, *, drop: bool = False) -> None:
        """With `runtime.generator_sleeps`, drop the KV cache and move the weights to host memory; `drop`: lose them. On
        a CPU, give up the memory of the KV cache, which comes back as it is written."""
        self._stays_awake = False
        if self._on_cpu and self._llm.reset_prefix_cache():
            self._llm.collective_rpc(_return_cache)
        if self._sleeps and self._asleep != set(MEMORY):
            self._llm.sleep(level=2 if drop else 1)
            self._asleep = set(MEMORY)

    def wake_up(self) -> None:
        """Stay awake until `sleep`, instead of for one `sample`."""
        self._stays_awake = True
        self._wake(*MEMORY)

    def _wake(self, *memory: str) -> None:
        if wanted := [each for each in memory if each in self._asleep]:
            self._llm.wake_up(wanted)
            self._asleep -= set(wanted)

    def sample(self, prompts: list[list[int]], seeds: list[int], sampling: Sampling) -> list[Reply]:
        num_top = min(sampling.reported, self._llm.model_config.get_vocab_size())
        params = [
            self._vllm.SamplingParams(
                max_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k or 0,
                min_p=sampling.min_p,
                repetition_penalty=sampling.repetition_penalty,
                seed=seed,
                logprobs=num_top,
                # Lists of numbers instead of an object per token, and no deep copy of an object that only we hold.
                flat_logprobs=True,
                skip_clone=True,
                skip_reading_prefix_cache=sampling.routes,
                detokenize=False,
                stop_token_ids=list(sampling.stop_token_ids),
            )
            for seed in seeds
        ]
        self._wake(*MEMORY)
        with self._recorded_routes() if sampling.routes else nullcontext() as recorded:
            outputs = self._llm.generate(
                [{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False, lora_request=self._adapter
            )
        if self._sleeps and not self._stays_awake:
            self.sleep()
        replies = [_reply(output.outputs[0], num_top) for output in outputs]
        if recorded is None:
            return replies
        counts = [len(prompt) + len(reply.token_ids) - 1 for prompt, reply in zip(prompts, replies, strict=True)]
        routes = (recorded.of(o.request_id, count) for o, count in zip(outputs, counts, strict=True))
        return [replace(reply, routes=found) for reply, found in zip(replies, routes, strict=True)]

    def logprobs(self, rows: list[list[int]]) -> list[float] | None:
        params = self._vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        self._wake(*MEMORY)
        outputs = self._llm.generate([{"prompt_token_ids": row} for row in rows], params, use_tqdm=False)
        if self._sleeps and not self._stays_awake:
            self.sleep()
        # Nothing is known of a row's first token.
        given = zip(rows, outputs, strict=True)
        return [
            place[token].logprob
            for row, o in given
            for token, place in zip(row[1:], o.prompt_logprobs[1:], strict=True)
        ]

    def _recorded_routes(self) -> AbstractContextManager[RecordedRequests]:
        from xray_runtime.engines.generators.vllm.routes import recorded_requests

        [runner] = self._llm.collective_rpc(lambda worker: worker.model_runner)
        return recorded_requests(runner)

    def layers_of(self, names: set[str]) -> set[str]:
        self._wake(WEIGHTS)
        [together] = self._llm.collective_rpc(lambda worker: worker.weight_transfer_engine.layers_of(names))
        return set(together)

    def write(self, tensors: Tensors, version: int) -> None:
        self.receive("start", {}, version)
        self._llm.update_weights({"update_info": {"tensors": tensors}})
        self.receive("finish", {}, version)

    def receive(self, step: str, info: dict[str, Any], version: int) -> None:
        """One step of a transfer from GPU to GPU, driven by a trainer: `init`, `start`, `update`, …, `finish`.

        Its weights stay awake afterwards, since a rollout follows. Its cache does not wake up: the trainers that send
        do not sleep yet, and all three may be more than the GPU has.
        """
        self._wake(WEIGHTS)
        if step == "init":
            self._llm.init_weight_transfer_engine({"init_info": info})
        elif step == "start":
            # After an error in `finish`, vLLM would refuse another session.
            self._llm.collective_rpc(_close_session)
            # The cache holds prefixes as the old weights computed them.
            if not self._llm.reset_prefix_cache():
                raise RuntimeError("vLLM did not reset its prefix cache: a request is still running")
            if self._on_cpu:
                # Blocks are used in turn, so that otherwise every rollout would fill others until all are full.
                self._llm.collective_rpc(_return_cache)
            self._llm.start_weight_update()
        elif step == "update":
            self._llm.update_weights({"update_info": {"direct": info}})
        else:
            self._llm.finish_weight_update(str(version))


def _reply(completion: Any, num_top: int) -> Reply:
    """The reply in an output of vLLM, whose flat lists have at each place the sampled token and the `num_top`
    likeliest."""
    token_ids, flat = list(completion.token_ids), completion.logprobs
    if not num_top:
        return Reply(token_ids, flat.logprobs)
    shape = len(token_ids), 1 + num_top
    ids = np.array(flat.token_ids, np.int32).reshape(shape)
    logprobs = np.array(flat.logprobs, np.float32).reshape(shape)
    return Reply(token_ids, logprobs[:, 0].tolist(), top=TopTokens(ids[:, 1:], logprobs[:, 1:]))


def _return_cache(worker: Any) -> None:
    for cache in worker.model_runner.kv_caches:
        # The caches of layers may be views of one tensor.
        memory = cache.untyped_storage()
        return_pages(memory.data_ptr(), memory.nbytes())


def _close_session(worker: Any) -> None:
    worker._weight_update_active = False


def _launch(rank: EngineRank) -> None:
    """Set the rendezvous of vLLM's ranks to our address instead of one from the environment.

    vLLM names shared memory after this address. With an address from the environment two models on one machine would
    collide, and remains of a killed rank in /dev/shm would stop the next one. A query that differs by rank makes vLLM
    use gloo instead of shared memory.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    os.environ |= {"RANK": str(rank.rank), "WORLD_SIZE": str(rank.world_size)}
    address = f"tcp://{rank.host}:{rank.port}?name={rank.rank}"
    local_rank = 0 if rank.device == "cuda" else rank.rank
    ExecutorWithExternalLauncher._distributed_args = lambda self: (address, rank.rank, local_rank)


def _unlink_shared_memory() -> None:
    """Unlink vLLM's message ring, which every rank has opened, so that it ends with the processes."""
    from vllm.distributed.parallel_state import get_tp_group

    ring = get_tp_group().mq_broadcaster
    if ring is not None and ring.buffer.is_creator:
        ring.buffer.shared_memory.unlink()
        ring.buffer.is_creator = False
