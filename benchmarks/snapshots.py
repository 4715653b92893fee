"""What snapshots at the default interval cost: whole lifecycles with and without them, in turns.

    python -m benchmarks.snapshots [CONFIG] [--pairs 3]

Seconds of each training stage as `lifecycle.json` has them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.machine import machine, ratio, spread, table

NEVER = "runtime.snapshot_every=1000000"
TRAINING = ("sft", "reward", "ppo")


def seconds(config: Path, output: Path, *overrides: str) -> dict[str, float]:
    """Training stage → seconds, of a lifecycle from nothing."""
    command = [sys.executable, "-m", "flows.cli", "run", str(config), "--output", str(output), "--json"]
    command += [part for override in overrides for part in ("--set", override)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    stages = json.loads(done.stdout)["stages"]
    return {stage["name"]: stage["seconds"] for stage in stages if stage["name"].startswith(TRAINING)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, nargs="?", default=Path("configs/quickstart.yaml"))
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    print(f"{machine()}; {options.config}, {options.pairs} pairs\n")
    found: dict[str, list[dict[str, float]]] = {"default": [], "never": []}
    for number in range(options.pairs):
        # Whoever comes second finds warm caches: the order changes from pair to pair.
        for name in sorted(found, reverse=bool(number % 2)):
            with tempfile.TemporaryDirectory() as directory:
                overrides = () if name == "default" else (NEVER,)
                found[name].append(seconds(options.config, Path(directory) / "run", *overrides))
    rows = []
    for stage in found["default"][0]:
        default, never = ([run[stage] for run in found[name]] for name in ("default", "never"))
        rows.append((stage, spread(default, " s"), spread(never, " s"), ratio(default, never)))
    table(("stage", "snapshots at the default interval", "none", "ratio of medians"), rows)


if __name__ == "__main__":
    main()
