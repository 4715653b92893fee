"""Measure the examples: minutes, and a score before and after, as rows of `examples/README.md`.

    python -m benchmarks.examples [--only 01_first_graph guess_number …] [--output DIR]

Each example runs whole, as a user runs it, in its own directory; a finished run is only read.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.machine import line, machine, table

ROOT = Path(__file__).parents[1]


class ExampleRun(NamedTuple):
    """How a row of the table is found in `lifecycle.json`."""

    flow: str
    evaluated: str | None = None
    """The metric of the evaluation, before and after."""
    column: str | None = None
    """Else a number of the table of evaluations."""
    policies: tuple[str, str] = ("sft", "ppo")
    folder: str = "."
    """The directory in which the command runs, below the repository's root."""


def lesson(name: str, **found: Any) -> tuple[str, ExampleRun]:
    return name, ExampleRun(f"examples.lessons.{name}:{name.partition('_')[2]}", **found)


EXAMPLES = dict(
    [
        lesson("01_first_graph", column="perplexity", policies=("fresh_base", "sft")),
        lesson("02_own_data", column="pass_at_1", policies=("fresh_base", "sft")),
        lesson("03_own_reward", evaluated="reward"),
        lesson("04_own_algorithm", evaluated="reward"),
        lesson("05_grpo_with_a_verifier", evaluated="reward"),
        lesson("06_tools", column="success"),
        lesson("07_plan_for_gpus", evaluated="reward"),
        lesson("08_promote_and_serve", evaluated="gold"),
        ("two_judges", ExampleRun("examples.two_judges:two_judges", evaluated="reward")),
        ("online_dpo", ExampleRun("examples.online_dpo:online_dpo", evaluated="reward")),
        ("distillation", ExampleRun("examples.distillation:distillation", evaluated="reward")),
        ("guess_number", ExampleRun("examples.guess_number:guess_number", column="success")),
        ("agents/largest_digit", ExampleRun("examples.agents.largest_digit:largest_digit", column="success")),
        (
            "own_project",
            ExampleRun("flows.short_replies:short_replies", evaluated="gold", folder="examples/own_project"),
        ),
        ("side_by_side", ExampleRun("examples.side_by_side:side_by_side", evaluated="reward")),
        ("squares_vlm", ExampleRun("examples.squares_vlm:squares_vlm", evaluated="reward")),
    ]
)
STANDALONE = "standalone_loop"


def score(example: ExampleRun, lifecycle: dict[str, Any]) -> str:
    """Before → after, with the interval of the difference, or of each."""
    if example.evaluated is not None:
        evaluation, name = lifecycle["evaluation"], example.evaluated
        low, high = evaluation[f"{name}_delta_ci95"]
        return f"{evaluation[f'{name}_before']:.3f} → {evaluation[f'{name}_after']:.3f} ({low:+.3f} to {high:+.3f})"
    shown = lifecycle["evaluations"]
    column = shown["columns"].index(example.column)
    numbers = {row["policy"]: row["numbers"][column] for row in shown["rows"]}
    parts = [numbers[policy] for policy in example.policies if numbers.get(policy)]
    return " → ".join(f"{value:.3f} ({low:.3f} to {high:.3f})" for value, low, high in parts)


def run(name: str, output: Path) -> tuple[str, str]:
    """(minutes, score) of one example."""
    began = time.monotonic()
    if name == STANDALONE:
        command = [sys.executable, str(ROOT / "examples" / f"{STANDALONE}.py")]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        last = re.search(r"([\d.]+ → [\d.]+) \(\d+ s\)", done.stdout.splitlines()[-1])
        found = last[1] if last else "?"
    else:
        example = EXAMPLES[name]
        command = [sys.executable, "-m", "xray.cli.main", "run", example.flow, "--json"]
        command += ["--output", str(output / name)]
        done = subprocess.run(command, check=True, cwd=ROOT / example.folder, stdout=subprocess.PIPE, text=True)
        found = score(example, json.loads(done.stdout))
    return f"{(time.monotonic() - began) / 60:.1f}", found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*EXAMPLES, STANDALONE], default=[*EXAMPLES, STANDALONE])
    parser.add_argument("--output", type=Path, default=Path("runs/examples"))
    options = parser.parse_args()
    print(f"{machine()}\n")
    table(("example", "minutes", "before → after"), [])
    for name in options.only:
        line((name, *run(name, options.output.absolute())))


if __name__ == "__main__":
    main()
