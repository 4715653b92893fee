"""A sync of an adapter beside one of the merged matrices, and the speed at which vLLM samples with each; then a policy
beside its base, as two models and as one base with an adapter: the change from one to the other in a generator, and the
scores of both, which the KL of an evaluation needs.

    python -m benchmarks.adapter_sync [--rank 16] [--repeat 10]

A random Llama of 5.2M parameters on a CPU, one thread; each way, and each model that scores, in a process of its own.
Milliseconds are the best of the repetitions, MB the memory that a process shares with no other.
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
from typing import Any

import psutil
import torch

from benchmarks.layouts import make_model
from xray_runtime.cluster.learner import Learner
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.cluster.types import RankInfo
from xray_runtime.data.batch import TextBatch
from xray_runtime.engines.generation import Generation
from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.engines.sampling import EngineRank, Sampling
from xray_runtime.engines.sync.object_store import pack
from xray_runtime.engines.sync.shared_memory import SharedWriter
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.graph.artifacts import ADAPTER
from xray_runtime.models.adapter_files import write_adapter
from xray_runtime.models.adapters import Adapters
from xray_runtime.models.causal_lm import copy_model, load_model
from xray_runtime.models.config import FreshBase
from xray_runtime.models.lora import LoRAConfig
from xray_runtime.models.objectives import ReferenceObjective
from xray_runtime.models.weight_files import overwrite

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


def drawn(model: Path, length: int) -> list[list[int]]:
    """Random rows of the model's tokens."""
    vocab_size = int(json.loads((model / "config.json").read_text())["vocab_size"])
    return torch.randint(5, vocab_size, (REPLIES, length), generator=torch.Generator().manual_seed(length)).tolist()


def measured(way: str, model: Path, lora: LoRAConfig, repeat: int) -> dict[str, float]:
    """Measure one kind of sync: its bytes and milliseconds, and the tokens sampled a second."""
    torch.set_num_threads(1)
    lm, memory = load_model(model), SharedWriter()
    adapters = Adapters(lm, lora, model, seed=1)
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

    prompts = drawn(model, PROMPT)
    sampling = Sampling(TOKENS, 1.0, (), 0)
    synced = best(repeat, sync)
    sampled = best(3, lambda number: engine.generate(prompts, list(range(REPLIES)), sampling, repeat))
    return {"bytes": sizes[0], "ms": 1000 * synced, "tokens_per_s": REPLIES * TOKENS / sampled}


def changed(way: str, model: Path, policy: Path, lora: LoRAConfig, repeat: int) -> dict[str, float]:
    """Measure a generator's change from `model` to `policy` and back."""
    torch.set_num_threads(1)
    runtime = RuntimeConfig(threads=1, device="cpu", generator_memory_gib=0.25)
    asked = lora if way == "adapter" else None
    engine = Generation(model, 128, GeneratorConfig(), runtime, EngineRank("cpu"), asked)

    def there_and_back(number: int) -> None:
        engine.restart(policy, number)
        engine.restart(model, number)

    return {"ms": 500 * best(repeat, there_and_back)}


def scored(spec: ModelSpec, both: bool, repeat: int) -> dict[str, float]:
    """Measure one process that scores replies; `both`: by the policy and by its base."""
    learner: Any = Learner(RuntimeConfig(threads=1, device="cpu"))
    learner.build(spec, RankInfo("scorer", 0, 0, 1, "127.0.0.1", 0, None))
    rows = TextBatch.of(drawn(spec.directory, PROMPT), drawn(spec.directory, TOKENS))
    spent = best(repeat, lambda number: [learner.score(rows), learner.reference(rows) if both else None])
    return {"ms": 1000 * spent, "mb": psutil.Process().memory_full_info().uss / 1e6}


def compared(way: str, model: Path, policy: Path, side: str, repeat: int) -> dict[str, float]:
    scores = ReferenceObjective(1.0)
    if way == "adapter":
        return scored(ModelSpec(model, scores, adapter=policy, reference=scores), True, repeat)
    return scored(ModelSpec(model if side == "base" else policy, scores), False, repeat)


def make_policy(model: Path, lora: LoRAConfig, place: Path) -> Path:
    """A published policy: merged weights and the adapter."""
    adapters = Adapters(load_model(model), lora, model, seed=1)
    with torch.no_grad():
        for layer in adapters.layers.values():
            layer.lora_B.weight.normal_(std=0.02)
    copy_model(model, place)
    overwrite(place, adapters.merged(lambda name, parameter: parameter.detach()), 0, 1)
    write_adapter(place / ADAPTER, lora, dict(adapters.unmerged(lambda name, parameter: parameter.detach())))
    return place


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--measure", choices=("sync", "change", "base", "policy"), help=argparse.SUPPRESS)
    parser.add_argument("--policy", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    lora = LoRAConfig(rank=options.rank)
    if options.way is not None:
        given = options.way, options.model
        if options.measure == "sync":
            found = measured(*given, lora, options.repeat)
        elif options.measure == "change":
            found = changed(*given, options.policy, lora, options.repeat)
        else:
            found = compared(*given, options.policy, options.measure, options.repeat)
        print(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as place:
        model = make_model(Path(place) / "model", BASE)
        policy = make_policy(model, lora, Path(place) / "policy")

        def run(way: str, measure: str) -> dict[str, float]:
            command = [sys.executable, "-m", "benchmarks.adapter_sync", "--way", way, "--measure", measure]
            command += ["--rank", str(options.rank), "--repeat", str(options.repeat)]
            command += ["--model", str(model), "--policy", str(policy)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            answer: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
            return answer

        print("| `adapter_sync` | sent, kB | sync, ms | tokens/s |\n|---|---|---|---|")
        for way in WAYS:
            found = run(way, "sync")
            row = f"{found['bytes'] / 1e3:,.0f} | {found['ms']:.1f} | {found['tokens_per_s']:,.0f}"
            print(f"| {way} | {row} |", flush=True)
        print("\n| a policy and its base | change in the generator, ms | scores of both, ms | processes | MB |")
        print("|---|---|---|---|---|")
        for way, title, sides in (("merged", "two models", ("base", "policy")), ("adapter", "one base", ("policy",))):
            change, scores = run(way, "change"), [run(way, side) for side in sides]
            spent, memory = (sum(each[unit] for each in scores) for unit in ("ms", "mb"))
            print(f"| {title} | {change['ms']:.1f} | {spent:.0f} | {len(sides)} | {memory:.0f} |", flush=True)


if __name__ == "__main__":
    main()
