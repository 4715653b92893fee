"""Would torch.compile pay? A training step of a small Llama, plain and compiled, and what compiling it costs.

    python -m benchmarks.compiled_step [--repeats 20]

The best case for the compiler: rows padded to one length, so that it compiles once, and all logits kept. Sequences that
are packed have other lengths in every batch. Both step in turns, in one process, with two threads; nothing compiled is
taken from an earlier run. What a step saves is of the fastest ones: other work only slows a step down.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import line, machine, ratio, spread, table
from benchmarks.weight_sync import quickstart

ROWS, TOKENS, THREADS = 16, 48, 2


def stepper(directory: Path, compiled: bool) -> Callable[[], None]:
    """One step of AdamW on fixed rows."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, trust_remote_code=False)
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, model.config.vocab_size, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))

    def loss(ids: Tensor) -> Tensor:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
        value: Tensor = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
        return value

    forward = torch.compile(loss) if compiled else loss

    def step() -> None:
        forward(ids).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    print(f"{machine()}\n")
    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/compiled"
        directory = Path(folder) / "model"
        quickstart(directory)
        steps = {"plain": stepper(directory, False), "compiled": stepper(directory, True)}
        first = {name: seconds(step) for name, step in steps.items()}
        found: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(options.repeats):
            for name, step in steps.items():
                found[name].append(seconds(step))
    table(("step", "first, s", "each after it, ms", "÷ plain"), [])
    for name, values in found.items():
        cells = spread(1000 * value for value in values), ratio(values, found["plain"])
        line((name, f"{first[name]:.1f}", *cells))
    saved = min(found["plain"]) - min(found["compiled"])
    pays = math.ceil((first["compiled"] - first["plain"]) / saved) if saved > 0 else "never"
    print(f"\nIt pays after this many steps: {pays}")


if __name__ == "__main__":
    main()
