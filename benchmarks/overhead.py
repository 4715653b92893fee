"""What an iteration costs where there is next to nothing to compute: calls, rows, records.

    python -m benchmarks.overhead [--iterations 40] [--repeats 3] [--only grpo]

A policy of one layer with a hidden size of 32, the smallest head that vLLM's kernels have; 8 replies of at most 4
tokens an iteration, the reward a function. PPO takes 4 optimizer steps with a critic that shares the trunk, GRPO 1.

CPU seconds do not depend on what else runs on the machine: a stage of twice as many iterations is held against one of
`--iterations`, process by process.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

import xray
from benchmarks.machine import machine, spread, table
from benchmarks.peers_measure import steps
from benchmarks.peers_work import share_of_e, write_rows

PHASES = ("sync", "generate", "score", "update", "ledger")
METHODS: dict[str, dict[str, Any]] = {
    "ppo": {"prompts_per_iteration": 8, "epochs": 4},
    "grpo": {"method": "grpo", "prompts_per_iteration": 2, "samples_per_prompt": 4},
}
BASE: dict[str, Any] = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 32, "num_layers": 1}
BASE |= {"num_heads": 1, "num_kv_heads": 1, "max_positions": 128}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=METHODS)
    options = parser.parse_args()
    print(f"{machine()}\n")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "runs"
        with xray.workspace(output, project="overhead"):
            chats = xray.prepare(source=str(write_rows(Path(folder), 200, None)[0]), max_prompt_tokens=96)
            policy = xray.fresh_base(chats, **BASE)

            def run(name: str, iterations: int, fields: dict[str, Any]) -> tuple[list[dict[str, float]], Counter[str]]:
                """The points of the stage `name`, and the CPU seconds of each process."""
                fields = fields | {"iterations": iterations, "name": name, "reward_scaling": "none", "stop_kl": None}
                fields |= {"minibatch_size": 8, "max_new_tokens": 4, "rewards": [xray.reward(share_of_e)]}
                before = cpu_seconds()
                trained = xray.ppo(policy, prompts=chats, **fields)
                found = steps(trained.result(), output)[1:]
                return found, cpu_seconds() - before

            for method in [options.only] if options.only else METHODS:
                # Processes that are new import their libraries in this one.
                run(f"{method}-first", 2, METHODS[method])
                found: list[dict[str, float]] = []
                cpu: list[Counter[str]] = []
                for repeat in range(options.repeats):
                    _, short = run(f"{method}-{repeat}-short", options.iterations, METHODS[method])
                    points, long = run(f"{method}-{repeat}", 2 * options.iterations, METHODS[method])
                    found += points
                    cpu.append(Counter({name: (long[name] - short[name]) / options.iterations for name in long}))
                columns = [[step[name] for step in found] for name in ("seconds", *(f"seconds/{p}" for p in PHASES))]
                whole = spread(sum(seconds.values()) for seconds in cpu)
                rows.append((method, *(spread(seconds) for seconds in columns), whole))
                for name, seconds in sum(cpu, Counter[str]()).most_common(8):
                    print(f"{method}: {seconds / len(cpu):.4f} CPU s an iteration: {name}", flush=True)
    print()
    table(("method", "seconds an iteration", *(f"{phase}, s" for phase in PHASES), "CPU s"), rows)


def cpu_seconds() -> Counter[str]:
    """CPU seconds so far of this process and its descendants, by title."""
    found: Counter[str] = Counter()
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            times = process.cpu_times()
            title = process.cmdline()[0].partition(".")[0] if process.name().startswith("ray::") else process.name()
            found[title] += times.user + times.system
    return found


if __name__ == "__main__":
    main()
