"""Loading a model: mapped from Ray's object store, against from_pretrained, torch.load and safetensors.

    python -m benchmarks.loading [--mib 128] [--readers 1 8]

Readers are actors that have imported everything; they load at the same time, then read every weight once. Time: until
the last reader has its model, and until it has read it. Memory: USS of all readers, what ending them would give back;
the one copy they may share (in the object store, or in the page cache) is not in it.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from pathlib import Path
from typing import Any

import ray

from benchmarks.machine import MIB, machine, own_bytes, ratio, spread, start_ray, table

REPEATS = 3
WAYS = ("zero-copy", "safetensors", "torch.load", "from_pretrained")


def make(directory: Path, mib: int) -> None:
    """A random Llama of about `mib` MiB as safetensors and as a torch file."""
    import torch
    import transformers

    hidden, layers = 512, max(1, round((mib * MIB / 4 - 2 * 8192 * 512) / 3.4e6))
    config = transformers.LlamaConfig(
        vocab_size=8192,
        hidden_size=hidden,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    lm = transformers.LlamaForCausalLM(config)
    lm.save_pretrained(directory)
    torch.save(lm.state_dict(), directory / "weights.pt")


class Reader:
    """A process that will use one model."""

    def __init__(self) -> None:
        import torch
        import transformers

        from xray_runtime.models import causal_lm  # noqa: F401
        from xray_runtime.weights import zero_copy  # noqa: F401

        torch.set_num_threads(1)
        self._llama = transformers.LlamaForCausalLM
        self._config = transformers.AutoConfig

    def ready(self) -> None:
        """Forget the model before."""
        self._model: Any = None
        gc.collect()
        self._before = own_bytes()

    def load(self, way: str, directory: Path, shared: Any) -> None:
        import torch

        if way == "zero-copy":
            from xray_runtime.weights.zero_copy import open_shared

            self._model = open_shared(shared)
        elif way == "from_pretrained":
            self._model = self._llama.from_pretrained(directory)
        else:
            with torch.device("meta"):
                self._model = self._llama(self._config.from_pretrained(directory))
            if way == "torch.load":
                state = torch.load(directory / "weights.pt", weights_only=True)
            else:
                from safetensors.torch import load_file

                state = load_file(directory / "model.safetensors")
            self._model.load_state_dict(state, assign=True)

    def read(self) -> float:
        """Touch every weight."""
        return sum(float(p.detach().sum()) for p in self._model.parameters())

    def memory(self) -> int:
        """Bytes of its own more than before the model."""
        return own_bytes() - self._before


def measure(way: str, readers: list[Any], directory: Path, shared: Any) -> tuple[float, float, float, float]:
    """Seconds to load, seconds to have read, MiB of USS of all `readers`, and what they read."""
    ray.get([r.ready.remote() for r in readers])
    start = time.perf_counter()
    ray.get([r.load.remote(way, directory, shared) for r in readers])
    loaded = time.perf_counter() - start
    sums = ray.get([r.read.remote() for r in readers])
    done = time.perf_counter() - start
    memory = ray.get([r.memory.remote() for r in readers])
    ray.get([r.ready.remote() for r in readers])
    return loaded, done, sum(memory) / MIB, sums[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=REPEATS)
    args = parser.parse_args()
    start_ray(num_cpus=1)
    from xray_runtime.models.causal_lm import load_model
    from xray_runtime.weights.zero_copy import share

    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        make(directory, args.mib)
        size = (directory / "model.safetensors").stat().st_size / MIB
        begin = time.perf_counter()
        shared = share(load_model(directory))
        put = time.perf_counter() - begin
        print(f"{machine()}; model of {size:.0f} MiB; read and put into the object store once in {put:.2f} s\n")
        readers = [ray.remote(Reader).options(num_cpus=0).remote() for _ in range(max(args.readers))]
        rows = []
        results: dict[tuple[str, int], list[tuple[float, float, float, float]]] = {}
        for _ in range(args.repeats):
            # Turn by turn, so that a machine that changes its speed changes it for all.
            for count in args.readers:
                for way in WAYS:
                    results.setdefault((way, count), []).append(measure(way, readers[:count], directory, shared))
        sums = {round(r[3], 1) for runs in results.values() for r in runs}
        assert len(sums) == 1, f"the ways read different weights: {sums}"
        for (way, count), runs in results.items():
            reference = [r[0] for r in results[("zero-copy", count)]]

            def column(i: int, runs: list[Any] = runs) -> list[float]:
                return [run[i] for run in runs]

            rows.append(
                [
                    way,
                    count,
                    spread(column(0), " s"),
                    ratio(column(0), reference),
                    spread(column(1), " s"),
                    spread(column(2)),
                ]
            )
        table(["way", "readers", "load", "÷ zero-copy", "load and read", "USS, MiB"], rows)


if __name__ == "__main__":
    main()
