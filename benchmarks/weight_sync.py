"""A weight sync through the object store, against one memcpy of the same bytes.

    python -m benchmarks.weight_sync [--mib 128]

Parts of a sync: `pack` in the trainer (checksums, copy into the object store), `verify` and `load` in the generator, a
transformers model in another process. Beside it the memory at each part's peak, the object store's not counted.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray

from benchmarks.loading import make
from benchmarks.machine import MIB, machine, ratio, spread, start_ray, table, times


class Generator:
    """The other side: a model that takes updates."""

    def __init__(self, directory: Path) -> None:
        import torch

        from xray_runtime.engines.generation.sampling import Place
        from xray_runtime.engines.generation.transformers_generate import TransformersSampler
        from xray_runtime.weights.versioned import VersionedWeights

        torch.set_num_threads(1)
        self._held = VersionedWeights(directory, TransformersSampler(directory, Place("cpu")).write)

    def verify(self, update: Any) -> float:
        from xray_runtime.weights.object_store import verify

        start = time.perf_counter()
        verify(update)
        return time.perf_counter() - start

    def load(self, update: Any) -> tuple[float, float]:
        """Seconds, and MiB of memory at the peak."""
        start = time.perf_counter()
        self._held.load(update)
        seconds = time.perf_counter() - start
        return seconds, peak_mib(lambda: self._held.load(update))


def anonymous_bytes() -> int:
    """Memory of this process that is no file's: the object store, through which the weights go, is one."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) * 1024


def peak_mib(work: Callable[[], object]) -> float:
    """MiB beside the object store that this process holds more at `work`'s peak."""
    done, seen = threading.Event(), [0.0]
    before = anonymous_bytes()

    def watch() -> None:
        while not done.wait(0.005):
            seen.append((anonymous_bytes() - before) / MIB)

    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    done.set()
    watcher.join()
    return max(seen)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=128)
    args = parser.parse_args()
    start_ray(num_cpus=2)
    import torch

    from xray_runtime.models.causal_lm import load_model
    from xray_runtime.weights.object_store import BUCKET_BYTES, pack

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), args.mib)
        lm = load_model(folder)
        generator = ray.remote(Generator).options(num_cpus=0).remote(Path(folder))
        size = sum(p.numel() * p.element_size() for p in lm.parameters())
        print(f"{machine()}; {size / MIB:.0f} MiB of weights, buckets of {BUCKET_BYTES / MIB:.0f} MiB\n")
        source, target = np.ones(size, dtype=np.uint8), np.empty(size, dtype=np.uint8)
        memcpy = times(lambda: np.copyto(target, source))
        update = pack(lm.named_parameters(), version=1)
        packing = times(lambda: pack(lm.named_parameters(), version=1))
        pack_peak = peak_mib(lambda: pack(lm.named_parameters(), version=1))
        verifying = [ray.get(generator.verify.remote(update)) for _ in range(6)][1:]
        loads = [ray.get(generator.load.remote(update)) for _ in range(6)][1:]

        loading = [seconds for seconds, _ in loads]
        whole = [p + s for p, s in zip(packing, loading, strict=True)]
        rows = [
            ["memcpy", spread(memcpy, " s"), "1×", ""],
            ["pack", spread(packing, " s"), ratio(packing, memcpy), f"{pack_peak:.0f}"],
            ["verify", spread(verifying, " s"), ratio(verifying, memcpy), ""],
            ["load (verify and write)", spread(loading, " s"), ratio(loading, memcpy), spread((m for _, m in loads))],
            ["pack and load", spread(whole, " s"), ratio(whole, memcpy), ""],
        ]
        table(["part", "time", "÷ memcpy", "extra MiB at its peak"], rows)


if __name__ == "__main__":
    main()
