"""Inject faults into a lifecycle in the middle of episodes of many turns.

`python -m tests.chaos.episodes --cases 20 --seed 0` injects the faults of `tests.chaos.harness`, but only while an
episode is open: its environment has answered, but not for the last time. A second lifecycle has an environment whose
answers contain the time, so that no two answers are the same: the policy must learn from the answers before the fault.
With `--lag 1`, episodes are open while the policy learns from earlier ones.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.chaos import games
from tests.chaos.harness import MAX_DELAY_SECONDS, ROOT, TARGETS, Case, Lifecycle, run, run_cases
from xray_runtime.agents.environments import worker
from xray_runtime.data.ledger import iterations, read_shard, readable, shard_path
from xray_runtime.kernel.store.manifest import LEDGER
from xray_runtime.models.causal_lm import load_tokenizer

FRESH_S = games.PAUSE_S
"""An answer younger than this is not followed by the next one yet."""
TARGETS_IN_PLAY = {name: TARGETS[name] for name in ("driver", "generator", "learner", "stage")}
TARGETS_IN_PLAY["environment"] = worker.__name__
PATIENCE = ("runtime.retries=20", "runtime.restarts=20", "runtime.stall_timeout_s=240")
"""No fault here is detected by missing progress; on a busy machine, a start takes minutes."""


def draw(seed: int, stage: str) -> Case:
    """The case of `seed`, in `stage`. Only environments are stopped, since their supervisor detects it; the other
    harness stops other processes."""
    rng = random.Random(seed)
    target = rng.choice(sorted(TARGETS_IN_PLAY))
    action = rng.choice(("kill", "stop")) if target == "environment" else "kill"
    return Case(seed, target, action, stage, rng.uniform(0.0, MAX_DELAY_SECONDS))


class Journals:
    """The answers in the journals at each fault."""

    def __init__(self) -> None:
        self.answers: dict[tuple[Path, str], dict[str, Any]] = {}
        """(output, stage) → key → line of the journal."""

    def moment(self, output: Path, stage: str) -> str | None:
        """Record and describe the answers if an episode is open (its last answer is recent and not final)."""
        for path in output.glob(f"snapshots/{stage}-*/answers.jsonl"):
            try:
                is_fresh = time.time() - path.stat().st_mtime < FRESH_S
                *whole, _ = path.read_text().split("\n")
            except FileNotFoundError:
                continue
            answers = [line for line in map(json.loads, whole) if line["source"] == "environment"]
            if is_fresh and answers and not answers[-1].get("answer", {"terminated": True}).get("terminated", False):
                known = self.answers.setdefault((output, stage), {})
                found = {line["key"]: line for line in answers}
                assert known.items() <= found.items(), f"{path}: answers have changed"
                known |= found
                return f", an episode open, {len(answers)} answers known"
        return None


def write_letters(directory: Path) -> Path:
    """A data file in `directory`, of replies of one letter."""
    directory.mkdir(parents=True, exist_ok=True)
    data = directory / "letters.jsonl"
    if not data.exists():
        rows = [{"prompt": f"Game {number}", "completion": "abcdefgh"[number % 8]} for number in range(200)]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return data


def lifecycle(directory: Path, journals: Journals, lag: int = 0) -> Lifecycle:
    """The lifecycle of `episodes.yaml`; its data is written into `directory`."""
    data = write_letters(directory)
    return Lifecycle(
        config=str(Path(__file__).with_name("episodes.yaml")),
        overrides=(f"data.source={data}", *(f"ppo.stages.{number}.lag={lag}" for number in (0, 1)), *PATIENCE),
        variables={"XRAY_ALLOWED_IMPORTS": games.__name__},
        stages=("ppo-1", "ppo-2"),
        faults_per_stage=5,
        targets=TARGETS_IN_PLAY,
        draw=draw,
        moment=journals.moment,
    )


def clock(directory: Path, journals: Journals, lag: int = 0) -> Lifecycle:
    """The same lifecycle with an environment whose answers contain the time."""
    letters = lifecycle(directory, journals, lag)
    paths = (f"ppo.stages.{number}.environment.path={games.__name__}:Clock" for number in (0, 1))
    return replace(letters, overrides=(*letters.overrides, *paths))


def lost_answers(output: Path, journals: Journals) -> list[str]:
    """The answers from before a fault that the policy of `output` did not learn from exactly once."""
    content, lost = json.loads((output / "lifecycle.json").read_text()), []
    for stage in content["stages"]:
        known = journals.answers.get((output, stage["name"]), {}).values()
        checkpoint = Path(stage["checkpoint"]["uri"].removeprefix("file://"))
        read: Counter[str] = Counter()
        for iteration in iterations(checkpoint / LEDGER) if known else ():
            table = read_shard(shard_path(checkpoint / LEDGER, iteration)).table
            for row in readable(table, load_tokenizer(checkpoint)):
                read.update(re.findall(r"\[(\d+)\]", row["reply"]))
        steps = [line["answer"] for line in known if "terminated" in line["answer"]]
        texts = [step["messages"][0]["content"] for step in steps if not step["terminated"]]
        lost += [f"{stage['name']}: {text} was read {read[text]} times" for text in texts if read[text] != 1]
    return lost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lag", type=int, choices=(0, 1), default=0)
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "chaos-episodes")
    options = parser.parse_args()
    letters = lifecycle(options.output, Journals(), options.lag)
    hits, _, bad = run_cases(letters, options.output, options.cases, 0, options.seed)
    journals = Journals()
    cases = [draw(options.seed + i, stage) for i, stage in enumerate(letters.stages * 2)]
    faults = run(options.output / "clock", cases, clock(options.output, journals, options.lag))
    lost = lost_answers(options.output / "clock", journals)
    count = sum(map(len, journals.answers.values()))
    print(f"clock: {sum(fault.hit for fault in faults)} faults hit; {len(lost)} of {count} earlier answers were lost")
    print("\n".join(f"    {line}" for line in [*faults, *lost]))
    sys.exit(1 if bad or lost or hits < options.cases or not any(fault.hit for fault in faults) else 0)


if __name__ == "__main__":
    main()
