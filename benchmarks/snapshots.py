"""What snapshots at the default interval cost: the PPO stages with and without them, in turns.

    python -m benchmarks.snapshots [CONFIG] [--pairs 3]

One lifecycle is run whole; then its PPO stages again and again, on the same parents. Seconds as in `lifecycle.json`.
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


def seconds(config: Path, output: Path, number: int, *overrides: str) -> dict[str, float]:
    """PPO stage → seconds, of a lifecycle in `output` that finds everything else done."""
    # A guard that nothing comes near, a little different each time: what was computed before does not serve.
    nudge = f"ppo.stages.0.max_mismatch={0.5 + number / 1000}"
    command = [sys.executable, "-m", "xray.cli.main", "run", str(config), "--output", str(output), "--json"]
    command += [part for override in (nudge, *overrides) for part in ("--set", override)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    stages = json.loads(done.stdout)["stages"]
    return {stage["name"]: stage["seconds"] for stage in stages if stage["name"].startswith("ppo")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, nargs="?", default=Path("configs/quickstart.yaml"))
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    print(f"{machine()}; {options.config}, {options.pairs} pairs\n")
    found: dict[str, list[dict[str, float]]] = {"default": [], "never": []}
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "run"
        seconds(options.config, output, 0)
        for pair in range(options.pairs):
            # The order changes from pair to pair, lest one always finds the machine as the other left it.
            for name in sorted(found, reverse=bool(pair % 2)):
                number = 1 + sum(map(len, found.values()))
                found[name].append(seconds(options.config, output, number, *(() if name == "default" else (NEVER,))))
    rows = []
    for stage in found["default"][0]:
        default, never = ([run[stage] for run in found[name]] for name in ("default", "never"))
        rows.append((stage, spread(default, " s"), spread(never, " s"), ratio(default, never)))
    table(("stage", "snapshots at the default interval", "none", "ratio of medians"), rows)


if __name__ == "__main__":
    main()
