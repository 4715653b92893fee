"""What a call between actors costs: a plain function, one actor, and a proxy in front of an actor as WholeModel is.

    python -m benchmarks.actor_calls [--calls 200]

Each call carries rows of the given size there and back one number; the rows of the last line are in the object store
already, as a batch that several models score is.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import ray

from benchmarks.machine import MIB, machine, ratio, spread, start_ray, table, times


class Worker:
    """Looks at what it is given."""

    def look(self, rows: dict[str, np.ndarray]) -> int:
        return sum(int(column[0, 0]) for column in rows.values())


class Proxy:
    """Passes calls on, as a WholeModel does."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def look(self, rows: dict[str, np.ndarray]) -> int:
        answer: int = ray.get(self._worker.look.remote(rows))
        return answer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=200)
    args = parser.parse_args()
    start_ray(num_cpus=2)
    plain = Worker()
    worker = ray.remote(Worker).options(num_cpus=0).remote()
    proxy = ray.remote(Proxy).options(num_cpus=0).remote(worker)
    print(f"{machine()}; milliseconds a call, {args.calls} calls one after the other\n")
    lines = []
    for label, size in (("8 bytes", 8), ("256 KiB", 2**18), ("16 MiB", 16 * MIB), ("16 MiB, put before", 16 * MIB)):
        rows = {"input_ids": np.ones((1, size // 8), dtype=np.int64)}
        calls = max(args.calls * 8 // size, min(args.calls, 20)) if size > 2**18 else args.calls
        given = ray.put(rows) if "put" in label else rows

        def each(work: Any, calls: int = calls) -> list[float]:
            def repeat() -> None:
                for _ in range(calls):
                    work()

            return [seconds / calls * 1000 for seconds in times(repeat)]

        local = each(lambda rows=rows: plain.look(rows))
        one = each(lambda given=given: ray.get(worker.look.remote(given)))
        two = each(lambda given=given: ray.get(proxy.look.remote(given)))
        lines.append([label, spread(local), spread(one), spread(two), ratio(two, one)])
    table(["rows", "function", "actor", "proxy and actor", "proxy ÷ actor"], lines)


if __name__ == "__main__":
    main()
