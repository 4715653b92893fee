"""A sync of an adapter beside one of the merged matrices, and the speed at which vLLM samples with each.

    python -m benchmarks.adapter_sync [--rank 16] [--repeat 10]

A random Llama of 5.2M parameters on a CPU, one thread; each way in a process of its own. Seconds are the best of the
repetitions.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.layouts import make_model
from xray_runtime.engines.generation import Generation
from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.engines.sampling import EngineRank, Sampling
from xray_runtime.engines.sync.object_store import pack
from xray_runtime.engines.sync.shared_memory import SharedWriter
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.models.adapters import Adapters
from xray_runtime.models.causal_lm import load_model
from xray_runtime.models.config import FreshBase
from xray_runtime.models.lora import LoRAConfig

BASE = FreshBase(
    vocab_size=512, hidden_size=256, num_layers=6, num_heads=4, num_kv_heads=4, intermediate_size=768, max_positions=128
)
WAYS = ("merged", "adapter")
REPLIES, PROMPT, TOKENS = 64, 45, 16


def best(repeat: int, run: Callable[[int], object]) -> float:
    seconds = []
    for number in range(repeat):
        start = time.perf_counter()
        run(number)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measured(way: str, model: Path, lora: LoRAConfig, repeat: int) -> dict[str, float]:
    """Measure one kind of sync: its bytes and milliseconds, and the tokens sampled a second."""
    torch.set_num_threads(1)
    lm, memory = load_model(model), SharedWriter()
    adapters = Adapters(lm, lora, model, seed=1)
    vocab_size = int(json.loads((model / "config.json").read_text())["vocab_size"])
    with torch.no_grad():
        for layer in adapters.layers.values():
            layer.lora_B.weight.normal_(std=0.02)
    export = adapters.merged if way == "merged" else adapters.unmerged
    runtime = RuntimeConfig(threads=1, device="cpu", generator_memory_gib=0.25)
    asked = lora if way == "adapter" else None
    engine = Generation(model, 128, GeneratorConfig(), runtime, EngineRank("cpu"), asked)
    sizes: list[int] = []

    def sync(number: int) -> None:
        update = pack(export(lambda name, parameter: parameter.detach()), number + 1, memory)
        engine.weights.load(update)
        engine.weights.use(number + 1)
        sizes.append(update.num_bytes)

    prompts = torch.randint(5, vocab_size, (REPLIES, PROMPT), generator=torch.Generator().manual_seed(0)).tolist()
    sampling = Sampling(TOKENS, 1.0, (), 0)
    synced = best(repeat, sync)
    sampled = best(3, lambda number: engine.generate(prompts, list(range(REPLIES)), sampling, repeat))
    return {"bytes": sizes[0], "ms": 1000 * synced, "tokens_per_s": REPLIES * TOKENS / sampled}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way is not None:
        found = measured(options.way, options.model, LoRAConfig(rank=options.rank), options.repeat)
        print(json.dumps(found))
        return
    print("| `adapter_sync` | sent, kB | sync, ms | tokens/s |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        model = make_model(Path(place) / "model", BASE)
        again = ["--rank", str(options.rank), "--repeat", str(options.repeat), "--model", str(model)]
        for way in WAYS:
            command = [sys.executable, "-m", "benchmarks.adapter_sync", *again, "--way", way]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found = json.loads(done.stdout.strip().splitlines()[-1])
            print(
                f"| {way} | {found['bytes'] / 1e3:,.0f} | {found['ms']:.1f} | {found['tokens_per_s']:,.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
