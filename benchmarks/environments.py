"""Does a policy learn in an environment? How often held-out episodes succeed before and after, by task and method.

    python -m benchmarks.environments [--seeds 3] [--tasks calculator …] [--methods grpo ppo]

`calculator`: a Python function through `from_tools`, called and then quoted. `guess-number`: a game of four turns.
`legs`: an item of reasoning-gym, and one reply to it. Demonstrations are right half of the time. Both methods start
from one SFT model a seed and take each episode once (of more passes over them PPO unlearned the calls of some seeds);
before and after play all held-out prompts once, at temperature 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import flow

import xray
from benchmarks import calculator
from benchmarks.legs import items, legs
from benchmarks.machine import line, machine, table
from examples import guess_number

EPISODES, SAMPLES = 128, 8
ALL = 10_000
"""More prompts than any task holds out."""


@dataclass(frozen=True)
class Task:
    """What is learned, and with which settings."""

    start: Callable[[Path], tuple[xray.Handle, xray.Handle]]
    """A directory for its data → (prompts, the SFT model)."""
    played: Mapping[str, Any]
    """`environment` and `max_new_tokens`."""
    success: float
    """An episode with at least this reward has succeeded."""
    iterations: int
    lr: float = 1e-3


TASKS = {
    "calculator": Task(calculator.start, calculator.PLAYED, 1.0, 30, 3e-4),
    "guess-number": Task(guess_number.start, guess_number.PLAYED, 0.5, 40),
    "legs": Task(legs, {"environment": {"path": items, "max_turns": 1, "max_tokens": 8}, "max_new_tokens": 8}, 1.0, 30),
}
METHODS = ("grpo", "ppo")


@flow(task_runner=xray.task_runner(), persist_result=False)
def environments(
    output: Path, seeds: int, tasks: list[str], methods: list[xray.Method]
) -> dict[tuple[str, str], list[tuple[Any, Any]]]:
    """(task, method) → the suites before and after of each seed."""
    found: dict[tuple[str, str], list[tuple[Any, Any]]] = {}
    for seed, name in itertools.product(range(seeds), tasks):
        task = TASKS[name]
        with xray.workspace(output / name, project="environments", seed=seed):
            prompts, sft = task.start(output / name)
            before = measured(task, sft, prompts, "before")
            for method in methods:
                samples = SAMPLES if method != "ppo" else 1
                policy = xray.ppo(
                    sft,
                    prompts=prompts,
                    method=method,
                    iterations=task.iterations,
                    prompts_per_iteration=EPISODES // samples,
                    samples_per_prompt=samples,
                    minibatch_size=EPISODES // 4,
                    epochs=1,
                    lr=task.lr,
                    name=method,
                    **task.played,
                )
                # One after the other: side by side they need the memory of all.
                after = measured(task, policy, prompts, f"{method}-after")
                found.setdefault((name, method), []).append((before, after))
    return found


def measured(task: Task, policy: xray.Handle, prompts: xray.Handle, name: str) -> Any:
    """The suite of a policy."""
    suite = xray.benchmark(
        policy, prompts=prompts, suite="environment", success=task.success, num_prompts=ALL, name=name, **task.played
    )
    return json.loads((suite.result().path / "benchmark.json").read_text())


def gain(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[float, float]:
    """The 95% interval of the difference between two shares, as if their episodes had nothing in common."""
    variance = sum(of["success"] * (1 - of["success"]) / of["episodes"] for of in (before, after))
    difference, width = after["success"] - before["success"], 1.96 * math.sqrt(variance)
    return difference - width, difference + width


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--output", type=Path, default=Path("runs/environments"))
    options = parser.parse_args()
    found = environments(options.output.absolute(), options.seeds, options.tasks, options.methods)
    print(f"{machine()}; {options.seeds} seeds\n")
    seeds = (f"seed {seed}: before → after" for seed in range(options.seeds))
    table(("task", "method", "episodes", *seeds, "learns"), [])
    for (name, method), suites in found.items():
        cells = []
        for before, after in suites:
            low, high = gain(before, after)
            cells.append(f"{before['success']:.3f} → {after['success']:.3f} ({low:+.3f} to {high:+.3f})")
        rises = sum(gain(*pair)[0] > 0 for pair in suites)
        line((name, method, suites[0][0]["episodes"], *cells, f"{rises} of {len(suites)}"))


if __name__ == "__main__":
    main()
