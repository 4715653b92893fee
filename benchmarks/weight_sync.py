"""A weight sync from trainer to generator, against one memcpy of the same bytes and vLLM's own load of them.

    python -m benchmarks.weight_sync [--mib 0 128]

Through the product's actors: `follow` of a vLLM generator, from a policy in another process, from call to answer; of a
policy of which all is trained, the top layer alone, or LoRA adapters (whose merged matrices are sent).
Beside it, in the generator's process and from its own memory: vLLM's layer-wise reload of the same tensors, and the
load that a sync ends with. All in turns. 0 MiB: the quickstart's policy.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray

from benchmarks.loading import make
from benchmarks.machine import MIB, line, machine, ratio, spread, start_ray, table
from xray_runtime.config.engines import LoRAConfig
from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.config.sft import SFTConfig
from xray_runtime.models.objectives import SFTObjective
from xray_runtime.workers.generator_spec import GeneratorSpec
from xray_runtime.workers.model_spec import ModelSpec
from xray_runtime.workers.opening import model_opener
from xray_runtime.workers.pool import open_worker_pool

RUN_ID = "benchmark"
TRAINED = {
    "all": SFTConfig(),
    "top layer": SFTConfig(trainable_layers=1),
    "LoRA of q_proj, v_proj": SFTConfig(lora=LoRAConfig(target_modules=["q_proj", "v_proj"])),
}
REPEATS = 15
WARM_UP = 4
"""Rounds that do not count: both buffers are mapped, and Ray's workers know each other."""


def quickstart(directory: Path) -> None:
    """A random Llama of the quickstart's shape."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=2048,
        hidden_size=160,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=5,
        num_key_value_heads=5,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(directory)


def in_generator(directory: Path, generator: Any) -> dict[str, float]:
    """Seconds of a memcpy of the model's tensors, of vLLM's own reload and of ours, in the generator's process."""
    from safetensors.torch import load_file

    sampler = generator._engine._sampler
    # Read once: the process may have been another model's before.
    if getattr(generator, "directory", None) != directory:
        generator.directory = directory
        generator.tensors = {n: t.clone() for n, t in load_file(directory / "model.safetensors").items()}
        generator.copies = [np.empty(t.numel() * t.element_size(), np.uint8) for t in generator.tensors.values()]
    tensors = generator.tensors
    seconds = {}

    def clock(name: str, work: Any) -> None:
        start = time.perf_counter()
        work()
        seconds[name] = time.perf_counter() - start

    def memcpy() -> None:
        for copy, tensor in zip(generator.copies, tensors.values(), strict=True):
            np.copyto(copy, tensor.view(-1).numpy().view(np.uint8))

    clock("memcpy", memcpy)
    clock("vLLM's load", lambda: sampler._llm.collective_rpc(vllm_load, args=(tensors,)))
    clock("our load", lambda: sampler.write(iter(tensors.items()), 0))
    return seconds


def vllm_load(worker: Any, tensors: dict[str, Any]) -> None:
    """vLLM's reload of a running model, as its own weight-transfer engines do it."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    model = worker.weight_transfer_engine.model
    with set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(model)
        model.load_weights(iter(tensors.items()))
        finalize_layerwise_reload(model, worker.vllm_config.model_config)


def measure(directory: Path, training: SFTConfig) -> tuple[float, dict[str, list[float]]]:
    """MiB that are sent, and seconds by part."""
    layers = training.trainable_layers
    specs: dict[str, Any] = {
        "generator": GeneratorSpec(directory, 64),
        "policy": ModelSpec(directory, SFTObjective(), training=training, trainable_layers=layers),
    }
    found: dict[str, list[float]] = {}
    runtime = RuntimeConfig(threads=1, device="cpu")
    with model_opener(runtime, directory.parent / "logs", RUN_ID)(specs) as models:
        generator: Any = models["generator"]
        policy: Any = models["policy"]

        def load(model: Any) -> dict[str, float]:
            seconds: dict[str, float] = ray.get(
                model._workhorses[0].__ray_call__.remote(partial(in_generator, directory))
            )
            return seconds

        for number in range(WARM_UP + REPEATS):
            start = time.perf_counter()
            ray.get(generator.follow.remote(policy, number + 1))
            seconds = {"sync": time.perf_counter() - start} | ray.get(generator.__ray_call__.remote(load))
            if number >= WARM_UP:
                for name, value in seconds.items():
                    found.setdefault(name, []).append(value)
        sent = ray.get(policy.__ray_call__.remote(num_bytes))
    return sent / MIB, found


def num_bytes(model: Any) -> int:
    """Of what a policy sends."""
    return int(model.export_weights(0).num_bytes)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, nargs="+", default=[0, 128])
    args = parser.parse_args()
    start_ray(num_cpus=2)
    pool = open_worker_pool(RUN_ID)
    print(f"{machine()}\n")
    print("memcpy and both loads are of the whole model.\n")
    parts = ("memcpy", "vLLM's load", "our load", "sync")
    columns = (f"{name}, ms" for name in parts)
    table(["model, MiB", "trained", "sent, MiB", *columns, "sync ÷ (memcpy + vLLM's load)"], [])
    for mib in args.mib:
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder) / "model"
            if mib:
                make(directory, mib)
            else:
                quickstart(directory)
            size = (directory / "model.safetensors").stat().st_size / MIB
            for name, training in TRAINED.items():
                sent, found = measure(directory, training)
                own = [a + b for a, b in zip(found["memcpy"], found["vLLM's load"], strict=True)]
                ms = [spread(1000 * s for s in found[part]) for part in parts]
                line([f"{size:.1f}", name, f"{sent:.1f}", *ms, ratio(found["sync"], own)])
    del pool  # it lives as long as its handle


if __name__ == "__main__":
    main()
