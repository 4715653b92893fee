"""Does every command work on every graph? Eight graphs, planned, run, searched, killed, audited and replayed.

    python -m benchmarks.any_graph --output DIR [--graphs NAME …]

Each cell is the real command on real engines with tiny models: `plan`; `auto`, a run whose layouts the planner chooses;
`tune`, two trials; `explain`, by which every stage is cached; `resume`, a run that is killed in its main stage and then
started again, with the bytes of the run that was not; `audit` of all that runs and trials made; `replay` of the main
stage. A cell that fails is named, and the others go on. Exit code 1 if one failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.graphs import GRAPHS, GraphCase
from benchmarks.machine import line, machine, table

ROOT = Path(__file__).parents[1]
XRAY = Path(sys.executable).with_name("xray")
RUNTIME = {"runtime.parallel": "auto", "runtime.snapshot_every": 1}
LIMIT_S = 900.0
"""No command may take longer."""
CACHED = 'every stage must be "cached"'


class CellError(Exception):
    """Why a cell failed, in a line."""


@dataclass(frozen=True)
class Commands:
    """The commands on one graph, in a directory of its own."""

    case: GraphCase
    directory: Path

    @property
    def run(self) -> Path:
        return self.directory / "run"

    def plan(self) -> None:
        planned = json.loads(self._xray("plan", self.case.flow, *self._settings(), "--json"))
        if not planned["fits"] or self.case.until not in planned["stages"]:
            raise CellError(f"the plan does not fit, or lacks {self.case.until}")

    def auto(self) -> None:
        self._xray(*self._run_command(self.run))

    def tune(self) -> None:
        search = self.directory / "search.yaml"
        wanted = {"fields": self.case.fields, "until": self.case.until, "metric": self.case.metric}
        search.write_text(yaml.safe_dump(wanted | {"mode": self.case.mode, "trials": 2}))
        where = ("--search", str(search), "--output", str(self.run))
        found = json.loads(self._xray("tune", self.case.flow, *self._settings(), *where, "--json"))
        for trial in found["trials"]:
            if trial["state"] != "finished":
                raise CellError(f"trial {trial['number']} {trial['state']}: {trial['error']}")
        if len(found["trials"]) != 2:
            raise CellError(f"{len(found['trials'])} trials, not 2")

    def explain(self) -> None:
        shown = self._xray(*self._run_command(self.run), "--explain", both=True)
        missing = [name for name in digests(self.run) if f"{name} cached" not in " ".join(shown.split())]
        if missing:
            raise CellError(f"{CACHED}, but {', '.join(missing)}: {' '.join(shown.split())}")

    def resume(self) -> None:
        output = self.directory / "resumed"
        shutil.rmtree(output, ignore_errors=True)
        command: list[str] = [str(XRAY), *self._run_command(output)]
        with open(self.directory / "killed.log", "wb") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=log, stderr=log)
            deadline = time.monotonic() + LIMIT_S
            while not self._is_at_work(output):
                if process.poll() is not None:
                    raise CellError(f"it ended with {process.returncode} before it could be killed")
                if time.monotonic() > deadline:
                    process.kill()
                    raise CellError(f"{self.case.until} did not begin within {LIMIT_S:.0f} s")
                time.sleep(0.05)
            process.kill()
            process.wait()
        if self.case.until in digests(output):
            raise CellError(f"{self.case.until} was over when it was killed")
        self._xray(*self._run_command(output))
        before, after = digests(self.run), digests(output)
        other = [name for name in before if after.get(name) != before[name]]
        if other or before.keys() != after.keys():
            raise CellError(f"other bytes than without the kill: {', '.join(other) or 'other stages'}")

    def audit(self) -> None:
        for output in (self.run, self.directory / "resumed"):
            found = json.loads(self._xray("audit", "--all", "--output", str(output), "--json"))
            # Notes, such as texts that evaluation shares with training, are about the data.
            broken = [finding for finding in found["findings"] if finding["broken"]]
            if broken:
                raise CellError(f"{broken[0]['code']}: {broken[0]['detail']}")

    def replay(self) -> None:
        [stage] = [s for s in lifecycle(self.run)["stages"] if s["name"] == self.case.until]
        ref = stage["checkpoint"]["sha256"]
        modules = [part for module in self.case.imports for part in ("--import", module)]
        found = json.loads(self._xray("replay", ref, "--output", str(self.run), *modules, "--json"))
        if not found["same"] or found["changes"]:
            raise CellError(str(found["difference"] or found["changes"]))

    def _settings(self) -> list[str]:
        values = self.case.small | RUNTIME
        return [part for path, value in values.items() for part in ("--set", f"{path}={json.dumps(value)}")]

    def _run_command(self, output: Path) -> list[str]:
        return ["run", self.case.flow, *self._settings(), "--output", str(output)]

    def _is_at_work(self, output: Path) -> bool:
        """Whether the main stage has done two steps, or, where it has none, holds its models."""
        if self.case.until == "evaluate":
            return any(output.glob("logs/evaluate/*"))
        files = output.glob(f"records/{self.case.until}-*/metrics.jsonl")
        # The last line may be half written.
        return any('"step": 1,' in path.read_text().rpartition("\n")[0] for path in files)

    def _xray(self, *arguments: str, both: bool = False) -> str:
        """Run the command; returns what it printed, with `both` also to stderr. Raises CellError if it fails."""
        self.directory.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [XRAY, *arguments], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=LIMIT_S
        )
        with open(self.directory / "commands.log", "a") as log:
            log.write(f"$ xray {' '.join(arguments)}\n{done.stdout}{done.stderr}exit code {done.returncode}\n\n")
        if done.returncode != 0:
            lines = [text for text in (done.stderr + done.stdout).splitlines() if text.strip()]
            first = next((text for text in lines if "error" in text.lower()), lines[-1] if lines else "")
            raise CellError(f"exit code {done.returncode}: {first.strip()}")
        return done.stdout + done.stderr if both else done.stdout


CELLS: dict[str, Callable[[Commands], None]] = {
    "plan": Commands.plan,
    "auto": Commands.auto,
    "tune": Commands.tune,
    "explain": Commands.explain,
    "resume": Commands.resume,
    "audit": Commands.audit,
    "replay": Commands.replay,
}


def environment() -> dict[str, str]:
    """As a person's shell, without servers of others; a replay may import the functions of these graphs."""
    hidden = ("PREFECT_", "RAY_", "MLFLOW_", "XRAY_")
    own = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    return own | {"XRAY_ALLOWED_IMPORTS": "examples.*,benchmarks.*"}


def lifecycle(output: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((output / "lifecycle.json").read_text())
    return content


def digests(output: Path) -> dict[str, str]:
    """Finished stage → sha256 of its checkpoint."""
    stages = lifecycle(output)["stages"]
    return {stage["name"]: stage["checkpoint"]["sha256"] for stage in stages if stage.get("checkpoint")}


def measure(case: GraphCase, directory: Path) -> dict[str, dict[str, Any]]:
    """Cell → its seconds, and its error or None."""
    found: dict[str, dict[str, Any]] = {}
    for cell, work in CELLS.items():
        start, error = time.perf_counter(), None
        try:
            work(Commands(case, directory))
        except Exception as caught:
            text = str(caught) if isinstance(caught, CellError) else f"{type(caught).__name__}: {caught}"
            error = text.splitlines()[0]
        found[cell] = {"seconds": round(time.perf_counter() - start, 1), "error": error}
        print(f"{directory.name} {cell}: {shown(found[cell])}", file=sys.stderr, flush=True)
    return found


def shown(cell: dict[str, Any]) -> str:
    return cell["error"].replace("|", "\\|") if cell["error"] else f"ok, {cell['seconds']:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--graphs", nargs="+", choices=GRAPHS, default=list(GRAPHS), metavar="NAME")
    options = parser.parse_args()
    output, where = options.output.absolute(), machine()
    start, found = time.perf_counter(), {}
    for name in options.graphs:
        found[name] = measure(GRAPHS[name], output / name.replace(" ", "-"))
        (output / "any_graph.json").write_text(json.dumps({"machine": where, "graphs": found}, indent=2))
    print(f"{where}; {(time.perf_counter() - start) / 60:.1f} minutes\n")
    table(("graph", *CELLS), [])
    for name, cells in found.items():
        line((name, *(shown(cell) for cell in cells.values())))
    return int(any(cell["error"] for cells in found.values() for cell in cells.values()))


if __name__ == "__main__":
    sys.exit(main())
