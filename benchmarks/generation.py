"""Tokens per second of the generation engines, side by side on the same prompts.

    python -m benchmarks.generation [--model DIR] [--prompts 64] [--samples 1] [--new-tokens 32] [--prompt-tokens 4 32]

Each engine runs as in a lifecycle, behind a WholeModel; tokens per second leave out its start. Without `--model` it is
a fresh Llama of about 1.3M parameters. Beside the speed: how far each engine's log-probabilities lie from a float32
forward of transformers, in nats.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray

from benchmarks.machine import line, machine, ratio, spread, start_ray, table, times
from xray_runtime.config.base import FreshBase
from xray_runtime.config.engines import GeneratorConfig
from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.data.rows import Ragged, Rows
from xray_runtime.engines.generation.sampling import Sampling
from xray_runtime.workers.generator_spec import GeneratorSpec
from xray_runtime.workers.opening import model_opener

ENGINES = {
    "vllm": (GeneratorConfig(), 1),
    "vllm, 2 replicas": (GeneratorConfig(), 2),
    "vllm, tensor parallel 2": (GeneratorConfig(tensor_parallel=2), 1),
    "deepspeed": (GeneratorConfig(engine="deepspeed"), 1),
    "deepspeed, tensor parallel 2": (GeneratorConfig(engine="deepspeed", tensor_parallel=2), 1),
    "transformers": (GeneratorConfig(engine="transformers"), 1),
}
"""Name → config, replicas."""


def fresh_model(directory: Path) -> Path:
    from xray_runtime.data.tokenizing import train_tokenizer
    from xray_runtime.models.causal_lm import fresh_llama, save_model

    tokenizer = train_tokenizer(["hello there", "how are you today"] * 20, 320)
    config = FreshBase(hidden_size=128, num_layers=6, num_heads=4, num_kv_heads=4, intermediate_size=384)
    save_model(fresh_llama(config, tokenizer, seed=0), tokenizer, directory)
    return directory


def distance(directory: Path, rows: Rows, replies: Rows, temperature: float) -> float:
    """Largest |log-probability − transformers' own| over all sampled tokens."""
    import torch

    from xray_runtime.models.causal_lm import load_model

    lm, worst = load_model(directory), 0.0
    for prompt, reply, logprobs in zip(
        rows["input_ids"], replies["response_ids"], replies["rollout_logprobs"], strict=True
    ):
        length, ids = len(prompt), torch.from_numpy(np.concatenate([prompt, reply]))[None]
        with torch.no_grad():
            logp = torch.log_softmax(lm(ids).logits[0].float() / temperature, -1)[length - 1 : -1]
        own = logp.gather(1, ids[0, length:, None])[:, 0].numpy()
        worst = max(worst, float(np.abs(own - logprobs).max()))
    return worst


def _answered(ask: Callable[[], Any]) -> Any:
    return ray.get(ask())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=1, help="replies to each prompt")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=[4, 32], help="at least, and less than")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    args = parser.parse_args()
    from xray_runtime.models.causal_lm import load_tokenizer, stops_of
    from xray_runtime.processes import kill_tagged, start_reaper

    mark = start_reaper()
    start_ray(num_cpus=2)
    with tempfile.TemporaryDirectory() as folder:
        directory = args.model or fresh_model(Path(folder) / "model")
        rng = np.random.default_rng(0)
        at_least, less_than = args.prompt_tokens
        prompts = [rng.integers(5, 250, size=n) for n in rng.integers(at_least, less_than, args.prompts)]
        ids = Ragged.of(prompt for prompt in prompts for _ in range(args.samples))
        rows = {"input_ids": ids, "seed": np.arange(args.prompts * args.samples)}
        stops = stops_of(directory, load_tokenizer(directory))
        sampling = Sampling(args.new_tokens, 1.0, stops, pad_token_id=0)
        print(f"{machine()}; {args.prompts} prompts, {args.samples} replies each, of {args.new_tokens} tokens\n")
        fastest: list[float] = []
        table(["engine", "tokens/s", f"÷ {args.engines[0]}", "start, s", "largest difference, nats"], [])
        for name in args.engines:
            config, replicas = ENGINES[name]
            runtime = RuntimeConfig(threads=2 // max(replicas, config.tensor_parallel), generator_replicas=replicas)
            begin = time.perf_counter()
            spec = GeneratorSpec(directory, max(map(len, prompts)) + args.new_tokens, config)
            with model_opener(runtime, Path(folder) / "logs", "benchmark")({"generator": spec}) as models:
                started = time.perf_counter() - begin
                ask = functools.partial(models["generator"].generate.remote, rows, sampling, 0)
                replies: Rows = ray.get(ask())
                seconds = times(functools.partial(_answered, ask), repeats=3)
            tokens = float(len(replies["response_ids"].values))
            speeds = [tokens / s for s in seconds]
            fastest = fastest or speeds
            worst = distance(directory, rows, replies, sampling.temperature)
            # Line by line: each engine takes its time to start.
            line([name, spread(speeds), ratio(speeds, fastest), f"{started:.0f}", f"{worst:.1e}"])
    ray.shutdown()
    kill_tagged(mark)


if __name__ == "__main__":
    main()
