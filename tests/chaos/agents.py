"""Kill agents, the gateway, the generator, the trainer and the driver in mid-episode, with lag 0, 1 and 4.

`python -m tests.chaos.agents --cases 40 --seed 0` kills them with `tests.chaos.harness` while an episode is open: a
call of it was journaled just now, and its result is not. Every checkpoint and every metric must be those of an
undisturbed lifecycle, but for the metric that counts agents that ran again. Then each stage of the last one is
replayed, without its agent. `kills.jsonl` in the output has what ended, so a command that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.machine import table
from tests.chaos import games
from tests.chaos.episodes import FRESH_S, PATIENCE, write_letters
from tests.chaos.harness import (
    BASELINE,
    MAX_DELAY_SECONDS,
    ROOT,
    TARGETS,
    Case,
    Lifecycle,
    differences,
    outcome,
    run,
)
from tests.chaos.servers import Servers, servers
from xray_runtime.agents import worker

TARGETS_IN_PLAY = {
    "agent": worker.__name__,
    "gateway": TARGETS["stage"],
    "generator": TARGETS["generator"],
    "trainer": TARGETS["learner"],
    "driver": TARGETS["driver"],
}
"""The gateway is in the process of its stage, agents in that of their worker."""
STAGES, LAGS = ("ppo-1", "ppo-2", "ppo-3"), (0, 1, 4)
RAN_AGAIN = "rollout/agent/failed_infrastructure"


def moment(output: Path, stage: str) -> str | None:
    """The open episodes in the stage's journal; None if there are none, or if nothing was journaled just now: the stage
    is then training, or loading its models after the last kill."""
    for path in output.glob(f"snapshots/{stage}-*/answers.jsonl"):
        try:
            is_fresh = time.time() - path.stat().st_mtime < FRESH_S
            *whole, _ = path.read_text().split("\n")
        except FileNotFoundError:
            continue
        entries = [json.loads(line) for line in whole]
        begun = {entry["episode"] for entry in entries if "call" in entry}
        num_open = len(begun) - sum("record" in entry for entry in entries)
        if is_fresh and num_open > 0:
            return f", {num_open} episodes open"
    return None


def draw(number: int, stage: str) -> Case:
    """All targets take turns."""
    target = list(TARGETS_IN_PLAY)[number % len(TARGETS_IN_PLAY)]
    return Case(number, target, "kill", stage, random.Random(number).uniform(0.0, MAX_DELAY_SECONDS))


def lifecycle(directory: Path, kept: Servers) -> Lifecycle:
    """That of `agents.yaml` on servers that are up; its data is written into `directory`."""
    return Lifecycle(
        config=str(Path(__file__).with_name("agents.yaml")),
        overrides=(f"data.source={write_letters(directory)}", *PATIENCE),
        variables={"XRAY_ALLOWED_IMPORTS": games.__name__} | kept.variables,
        stages=STAGES,
        targets=TARGETS_IN_PLAY,
        draw=draw,
        moment=moment,
        elsewhere=kept.processes,
    )


def lost(expected: Path, got: Path) -> list[str]:
    """What differs from the undisturbed lifecycle, but for how often agents ran again."""
    sides = [outcome(directory) for directory in (expected, got)]
    for side in sides:
        side["points"] = {where: value for where, value in side["points"].items() if where[1] != RAN_AGAIN}
    return differences(*sides)


def replayed(output: Path, stage: str, kept: Servers) -> str:
    """What a replay of a stage says in the end."""
    command = [sys.executable, "-m", "xray.cli.main", "replay", stage, "--output", str(output)]
    variables = os.environ | kept.variables
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    return f"{done.returncode}: {(done.stdout or done.stderr).strip().splitlines()[-1]}"


def disturbed(directory: Path, baseline: Path, cases: list[Case], about: Lifecycle) -> dict[str, Any]:
    """A lifecycle with kills as a line of the results; it begins again if it was not finished."""
    shutil.rmtree(directory, ignore_errors=True)
    begin = time.monotonic()
    faults = run(directory, cases, about)
    return {
        "directory": directory.name,
        "minutes": (time.monotonic() - begin) / 60,
        "lost": lost(baseline, directory),
        "kills": [[fault.case.target, fault.case.stage, fault.hit, str(fault)] for fault in faults],
    }


def hits(lines: list[dict[str, Any]]) -> Counter[tuple[str, str]]:
    """(target, stage) → kills that hit."""
    return Counter((target, stage) for line in lines for target, stage, hit, _ in line["kills"] if hit)


def show(lines: list[dict[str, Any]]) -> None:
    """Print the table."""
    counts, minutes = hits(lines), sum(line["minutes"] for line in lines)
    rows = [(target, *(counts[target, stage] for stage in STAGES)) for target in TARGETS_IN_PLAY]
    table(("killed", *(f"lag {lag}" for lag in LAGS)), rows)
    bad = sum(bool(line["lost"]) for line in lines)
    print(f"\n{counts.total()} kills hit in {len(lines)} lifecycles and {minutes:.0f} minutes; {bad} lost something")


def killed(output: Path, about: Lifecycle, num_cases: int, at_once: int, seed: int) -> list[dict[str, Any]]:
    """Run lifecycles until so many kills have hit; the lines of the results, earlier ones too."""
    baseline, results = output / BASELINE, output / "kills.jsonl"
    if not (baseline / "lifecycle.json").exists():
        shutil.rmtree(baseline, ignore_errors=True)
        run(baseline, [], about)
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    while (num_hit := hits(lines).total()) < num_cases:
        tried = sum(len(line["kills"]) for line in lines)
        if tried >= 2 * num_cases:
            break
        count = min(at_once, num_cases - num_hit)
        cases = [draw(seed + tried + i, STAGES[i * len(STAGES) // count]) for i in range(count)]
        lines.append(disturbed(output / f"faults-{tried}", baseline, cases, about))
        with results.open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
        print("\n".join(f"    {what}" for *_, what in lines[-1]["kills"]))
        print(f"{hits(lines).total()} kills hit: {lines[-1]['lost'] or 'the same bytes'}", flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--at-once", type=int, default=15, help="kills in one lifecycle")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "chaos-agents")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    with servers() as kept:
        lines = killed(options.output, lifecycle(options.output, kept), options.cases, options.at_once, options.seed)
        show(lines)
        last = options.output / lines[-1]["directory"]
        answers = {stage: replayed(last, stage, kept) for stage in STAGES}
    print("\n".join(f"replay of {stage}: {answer}" for stage, answer in answers.items()))
    failed = any(not answer.startswith("0:") for answer in answers.values())
    sys.exit(1 if failed or any(line["lost"] for line in lines) or hits(lines).total() < options.cases else 0)


if __name__ == "__main__":
    main()
