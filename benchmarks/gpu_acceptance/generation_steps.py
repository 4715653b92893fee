"""Steps that sample: speed and mismatch of engines, sleep, a neighbour's memory, weight sync by memory and CUDA IPC."""

from __future__ import annotations

import contextlib
import multiprocessing
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.gpu_acceptance import planned
from benchmarks.gpu_acceptance.setting import Setting, check, free_bytes
from xray_runtime.cluster.generator import Generator
from xray_runtime.cluster.generator_spec import GeneratorSpec
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.cluster.types import RankInfo
from xray_runtime.cluster.workhorse import reserve_port
from xray_runtime.data.batch import PromptBatch, ReplyBatch, Scores, StepTotals, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.engines.layouts import FrozenConfig, GeneratorConfig
from xray_runtime.engines.sampling import Sampling
from xray_runtime.models.lora import LoRAConfig
from xray_runtime.models.objectives import ReferenceObjective

Engine = Literal["vllm", "transformers"]
MISMATCH = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""Most mean |log-probability difference| between generator and trainer, in nats a token."""
SYNC_LR = 1e-3
"""Large enough that a step shows in every reply."""
GROWTH_BYTES = 2**29
"""A neighbour grows by this much at a time."""


def sampling(setting: Setting, temperature: float = 1.0) -> Sampling:
    """Replies of the longest length, with no token that ends one earlier."""
    return Sampling(setting.size.reply_tokens[1] - 1, temperature, stop_token_ids=(), pad_token_id=0)


def prompts(setting: Setting) -> PromptBatch:
    rows = setting.rows
    each = zip(rows.input_ids, rows.prompt_lengths, strict=True)
    ids = Ragged.of(tokens[:length] for tokens, length in each)
    return PromptBatch(input_ids=ids, seed=np.arange(len(ids)))


def max_length(setting: Setting) -> int:
    return setting.size.prompt_tokens[1] + setting.size.reply_tokens[1]


@contextlib.contextmanager
def generator(setting: Setting, engine: Engine, **runtime: Any) -> Iterator[Generator]:
    """A generator of the model in this process."""
    found, reserved = Generator(setting.runtime(**runtime)), reserve_port()
    spec = GeneratorSpec(setting.model, max_length(setting), GeneratorConfig(engine=engine))
    found.build(spec, RankInfo("generator", 0, 0, 1, "127.0.0.1", reserved.getsockname()[1], None))
    yield found
    reserved.close()


def mismatch(setting: Setting, replies: ReplyBatch, score: Callable[[TextBatch], Scores]) -> float:
    """Mean |difference| of the replies' log-probabilities, of the generator and by `score`; raises if it is large."""
    asked, sampled = prompts(setting), replies.response_ids
    scored = score(TextBatch.of(list(asked.input_ids), list(sampled)))
    [logprobs] = scored.columns().values()
    assert isinstance(logprobs, Ragged)
    off = float(np.abs(logprobs.values - replies.rollout_logprobs.values).mean())
    limit = MISMATCH[setting.half]
    check(off < limit, f"generator and trainer differ by {off:.3g} nats a token, more than {limit}")
    return off


def sample(setting: Setting, engine: Engine) -> dict[str, Any]:
    """Tokens a second of a whole batch, and the mismatch with the model that scores."""
    with generator(setting, engine) as model:
        model.generate(prompts(setting), sampling(setting), 0)  # CUDA graphs, compiled samplers
        start = time.perf_counter()
        replies = model.generate(prompts(setting), sampling(setting), 0)
        seconds = time.perf_counter() - start
    precision: Literal["bfloat16", "float32"] = "bfloat16" if setting.device == "cuda" else "float32"
    frozen = ModelSpec(setting.model, ReferenceObjective(1.0), frozen=FrozenConfig(precision=precision))
    with setting.learner(frozen) as scorer:
        off = mismatch(setting, replies, scorer.score)
    found = {"tokens_per_s": len(replies.response_ids.values) / seconds, "mismatch": off}
    if engine == "vllm" and setting.device == "cuda":
        expected = planned.sampling_seconds(setting)
        found |= {"planned_seconds": expected, "seconds_over_planned": seconds / expected}
    return found


def generator_sleep(setting: Setting) -> dict[str, Any]:
    """A sleeping vLLM holds little memory, and answers as before."""
    before = free_bytes()
    with generator(setting, "vllm", generator_sleeps=True) as model:
        answers, least = [], [free_bytes()]
        asleep = least[0]
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.02):
                least.append(int(torch.cuda.mem_get_info()[0]))

        watching = threading.Thread(target=watch)
        watching.start()
        for _ in range(2):
            answers.append(model.generate(prompts(setting), sampling(setting), 0))
        done.set()
        watching.join()
    one, other = (answer.response_ids.values for answer in answers)
    same = np.array_equal(one, other)
    check(same, "replies differ after sleep")
    freed = asleep - min(least)
    check(freed > 2**30, f"sleep freed {freed / 2**30:.2f} GiB, which must be above 1")
    return {"freed_bytes": freed, "held_asleep_bytes": before - asleep}


def neighbour(setting: Setting) -> dict[str, Any]:
    """vLLM starts while another process takes a third of the GPU, and neither counts the other's memory as its own."""
    context = multiprocessing.get_context("spawn")
    begin, end = context.Event(), context.Event()
    wanted = torch.cuda.get_device_properties(0).total_memory // 3
    process = context.Process(target=_grow, args=(wanted, begin, end), daemon=True)
    process.start()
    try:
        begin.wait()
        with generator(setting, "vllm") as model:
            replies = model.generate(prompts(setting), sampling(setting), 0)
            free = free_bytes()
    finally:
        end.set()
        process.join(30)
    return {"neighbour_bytes": wanted, "free_bytes": free, "num_replies": len(replies.response_ids)}


def _grow(wanted: int, begin: Any, end: Any) -> None:
    held = [torch.zeros(1, device="cuda")]
    begin.set()
    for _ in range(wanted // GROWTH_BYTES):
        held.append(torch.zeros(GROWTH_BYTES, dtype=torch.uint8, device="cuda"))
        time.sleep(0.1)
    end.wait()


def sync_memory(setting: Setting, lora: LoRAConfig | None = None) -> dict[str, Any]:
    """A step of the policy reaches vLLM through shared memory: seconds, bytes, and the mismatch afterwards."""
    spec = setting.spec(lora, zero_stage=0)
    totals = StepTotals(tokens=float(setting.rows.num_response_tokens()))
    with generator(setting, "vllm") as model, setting.learner(spec) as learner:
        before = model.generate(prompts(setting), sampling(setting), 0)
        learner.train(setting.rows, totals, SYNC_LR)
        start = time.perf_counter()
        update = learner.export_weights(1, True)
        export_s = time.perf_counter() - start
        start = time.perf_counter()
        check(model.load_weights(update) == 1, "the generator holds another version than it was sent")
        load_s = time.perf_counter() - start
        after = model.generate(prompts(setting), sampling(setting), 1)
        changed = not np.array_equal(before.rollout_logprobs.values, after.rollout_logprobs.values)
        check(changed, "the generator samples as before the step")
        learner.spec = ModelSpec(setting.model, ReferenceObjective(1.0), training=spec.training)
        off = mismatch(setting, after, learner.score)
    return {"num_bytes": update.num_bytes, "export_s": export_s, "load_s": load_s, "mismatch": off}


def sync_wide(setting: Setting) -> dict[str, Any]:
    """By CUDA IPC, with an embedding above vLLM's own gibibyte."""
    wide = replace(setting, wide=True)
    wide.make_model()
    try:
        return sync_direct(wide, "ipc")
    finally:
        shutil.rmtree(wide.model)


def sync_direct(setting: Setting, transport: Literal["ipc", "nccl"], lora: LoRAConfig | None = None) -> dict[str, Any]:
    """A step of the policy reaches vLLM from GPU to GPU through the product's actors: the bits of the verified way."""
    import ray

    from benchmarks.machine import start_ray
    from xray_runtime.cluster.opening import model_opener

    start_ray(num_cpus=4)
    runtime = setting.runtime(weight_transfer=transport, gpus_per_workhorse=0.5 if transport == "ipc" else 1.0)
    spec = setting.spec(lora, zero_stage=0)
    specs: dict[str, Any] = {"generator": GeneratorSpec(setting.model, max_length(setting)), "policy": spec}
    totals = StepTotals(tokens=float(setting.rows.num_response_tokens()))
    with model_opener(runtime, setting.folder / transport, "gpu-acceptance")(specs) as models:
        asked = prompts(setting), sampling(setting, temperature=0.7)
        ray.get(models["policy"].train.remote(setting.rows, totals, SYNC_LR))
        seconds = []
        for version in (1, 2):
            start = time.perf_counter()
            ray.get(models["generator"].follow.remote(models["policy"], version))
            seconds.append(time.perf_counter() - start)
        direct = ray.get(models["generator"].generate.remote(*asked, 2))
        whole: Any = models["policy"]
        update = ray.get(whole.export_weights.remote(3))
        ray.get(models["generator"].load_weights.remote(update))
        verified = ray.get(models["generator"].generate.remote(*asked, 3))
    same = np.array_equal(direct.rollout_logprobs.values, verified.rollout_logprobs.values)
    check(same, f"{transport} brought other weights than the checksummed way")
    ray.shutdown()
    return {"num_bytes": update.num_bytes, "first_s": seconds[0], "second_s": seconds[1]}
