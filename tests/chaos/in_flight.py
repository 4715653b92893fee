"""Kill the processes of a stage whose replies run across updates.

`python -m tests.chaos.in_flight --cases 40 --seed 0` kills the driver, the stage (which holds the rollout worker), the
generator and the learner of lifecycles with `in_flight_updates`, spread over their recorded iterations. No other run
has the schedule of such a lifecycle, so it is held against itself: what was recorded before a kill is in its ledger,
unchanged; its replay, of all iterations and of one in the middle, has the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.chaos.harness import ROOT, TARGETS, Case, Lifecycle, run
from xray_runtime.data.ledger import read_shard, shard_path
from xray_runtime.kernel.store.manifest import LEDGER

VICTIMS = {name: TARGETS[name] for name in ("driver", "stage", "generator", "learner")}
FAULTS, APART = 10, 1
"""Faults injected into each lifecycle, and the iterations recorded between them at least."""
STAGE = "ppo-1"
PATIENCE = ("runtime.retries=20", "runtime.restarts=20", "runtime.stall_timeout_s=240")
MIDDLE = 5
"""The iteration that is replayed by itself."""


def draw(seed: int, stage: str) -> Case:
    rng = random.Random(seed)
    return Case(seed, rng.choice(sorted(VICTIMS)), "kill", stage, rng.uniform(0.0, 4.0))


class Records:
    """The journal's lines at the time of each fault."""

    def __init__(self) -> None:
        self.lines: dict[Path, dict[str, dict[str, Any]]] = {}
        """Output → key → line of the journal."""
        self._faults = Counter[Path]()

    def moment(self, output: Path, stage: str) -> str | None:
        """Record and describe the journal, once as many iterations are in it as the fault waits for."""
        for path in output.glob(f"snapshots/{stage}-*/answers.jsonl"):
            *whole, _ = path.read_text().split("\n")
            found = {line["key"]: line for line in map(json.loads, whole)}
            iterations = sum("groups" in line for line in found.values())
            known = self.lines.setdefault(output, {})
            assert known.items() <= found.items(), f"{path}: what was recorded has changed"
            known |= found
            if iterations <= APART * self._faults[output]:
                return None
            self._faults[output] += 1
            return f", {iterations} iterations and {len(found) - iterations} replies recorded"
        return None


def lost(output: Path, known: dict[str, dict[str, Any]]) -> list[str]:
    """The entries recorded before a fault that are missing from the ledger of `output`."""
    [ledger] = output.glob(f"checkpoints/{STAGE}-*/{LEDGER}")
    schedule = {line["step"]: line["groups"] for line in known.values() if "groups" in line}
    newest: dict[tuple[int, int], dict[str, Any]] = {}
    for line in known.values():
        place = (line.get("group"), line.get("row"))
        if line["source"] == "turns" and line["attempt"] >= newest.get(place, line)["attempt"]:
            newest[place] = line
    found: list[str] = []
    for iteration, groups in schedule.items():
        rows = read_shard(shard_path(ledger, iteration)).table.to_pylist()
        if list(dict.fromkeys(row["group"] for row in rows)) != groups:
            found.append(f"iteration {iteration} has other groups than were recorded")
        size = len(rows) // len(groups)
        for row in rows:
            line = newest[row["group"], row["row"] % size]
            [[ids, logprobs, _, _]] = line["turns"]
            if (ids, logprobs) != (row["reply_ids"], row["rollout_logprobs"]):
                found.append(f"iteration {iteration}, row {row['row']} has another reply than was recorded")
    return found


def lifecycle(records: Records) -> Lifecycle:
    return Lifecycle(
        config=str(Path(__file__).with_name("in_flight.yaml")),
        overrides=PATIENCE,
        stages=(STAGE,),
        faults_per_stage=FAULTS,
        targets=VICTIMS,
        draw=draw,
        moment=records.moment,
    )


def checked(output: Path, cases: list[Case]) -> tuple[int, list[str]]:
    """Run a lifecycle with the faults of `cases`; returns (faults that hit, what was lost)."""
    records = Records()
    faults = run(output, cases, lifecycle(records))
    print("\n".join(f"    {fault}" for fault in faults), flush=True)
    wrong = lost(output, records.lines.get(output, {}))
    [checkpoint] = (path.name for path in (output / "checkpoints").glob(f"{STAGE}-*"))
    for extra in ([], ["--iteration", str(MIDDLE)]):
        line = [sys.executable, "-m", "xray.cli.main", "replay", checkpoint, "--output", str(output), *extra]
        replay = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=1200)
        if replay.returncode:
            wrong.append(f"replay {extra}: {replay.stdout[-500:]} {replay.stderr[-500:]}")
    return sum(fault.hit for fault in faults), wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "chaos-in-flight")
    options = parser.parse_args()
    hits = done = bad = 0
    while hits < options.cases and done < 3 * options.cases:
        cases = [draw(options.seed * 1_000_003 + done + n, STAGE) for n in range(min(FAULTS, options.cases - hits))]
        begin = time.monotonic()
        hit, wrong = checked(options.output / f"faults-{done}", cases)
        hits, done, bad = hits + hit, done + len(cases), bad + bool(wrong)
        print(
            f"{hits}/{options.cases} faults hit, {time.monotonic() - begin:.0f} s: {wrong or 'nothing lost'}",
            flush=True,
        )
    print(f"{hits} of {done} faults hit; {bad} lifecycles lost something", flush=True)
    sys.exit(1 if bad or hits < options.cases else 0)


if __name__ == "__main__":
    main()
