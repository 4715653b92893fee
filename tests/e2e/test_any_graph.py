"""Every command works on every graph: eight graphs, on real engines with tiny models."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.conftest import ROOT, XRAY, environment, xray
from tests.graphs import GRAPHS, GraphCase
from tests.waiting import wait_until

RUNTIME = {"runtime.parallel": "auto", "runtime.snapshot_every": 1}
LIMIT_S = 900.0
"""No command may take longer."""
ALLOWED = {"XRAY_ALLOWED_IMPORTS": "examples.*,tests.*"}
"""A replay imports the functions of these graphs."""


@dataclass(frozen=True)
class Commands:
    """The commands on one graph, in a directory of its own."""

    case: GraphCase
    directory: Path

    @property
    def run(self) -> Path:
        return self.directory / "run"

    def plan(self) -> None:
        planned = json.loads(ended_well("plan", self.case.flow, *self._settings(), "--json"))
        assert planned["fits"]
        assert self.case.until in planned["stages"]

    def auto(self) -> None:
        """A run whose layouts the planner chooses."""
        ended_well(*self._run_command(self.run))

    def tune(self) -> None:
        search = self.directory / "search.yaml"
        wanted = {"fields": self.case.fields, "until": self.case.until, "metric": self.case.metric}
        search.write_text(yaml.safe_dump(wanted | {"mode": self.case.mode, "trials": 2}))
        where = ("--search", str(search), "--output", str(self.run))
        found = json.loads(ended_well("tune", self.case.flow, *self._settings(), *where, "--json"))
        assert [trial["state"] for trial in found["trials"]] == ["finished"] * 2, found["trials"]

    def explain(self) -> None:
        """Every stage is cached."""
        shown = ended_well(*self._run_command(self.run), "--explain", with_stderr=True)
        text = " ".join(shown.split())
        assert [name for name in digests(self.run) if f"{name} cached" not in text] == [], text

    def resume(self) -> None:
        """A run that is killed in its main stage and started again has the bytes of the run that was not killed."""
        output = self.directory / "resumed"
        with open(self.directory / "killed.log", "wb") as log:
            command = [XRAY, *self._run_command(output)]
            process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=log, stderr=log)
            try:
                why = f"{self.case.until} did not begin"
                wait_until(lambda: self._is_at_work(output), seconds=LIMIT_S, process=process, why=why, pause_s=0.05)
            finally:
                process.kill()
                process.wait()
        assert self.case.until not in digests(output)
        ended_well(*self._run_command(output))
        assert digests(output) == digests(self.run)

    def audit(self) -> None:
        for output in (self.run, self.directory / "resumed"):
            found = json.loads(ended_well("audit", "--all", "--output", str(output), "--json"))
            # Notes, such as texts that evaluation shares with training, are about the data.
            assert [finding for finding in found["findings"] if finding["broken"]] == []

    def replay(self) -> None:
        """The main stage, computed again."""
        modules = [part for module in self.case.imports for part in ("--import", module)]
        ref = digests(self.run)[self.case.until]
        found = json.loads(ended_well("replay", ref, "--output", str(self.run), *modules, "--json"))
        assert found["same"], found["difference"]
        assert not found["changes"]

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


def ended_well(*arguments: str, with_stderr: bool = False) -> str:
    """The output of a command, which must exit with code 0."""
    done = xray(*arguments, timeout=LIMIT_S, variables=ALLOWED)
    assert done.code == 0, f"xray {' '.join(arguments)}\n{done.out}{done.err}"
    return done.out + done.err if with_stderr else done.out


def digests(output: Path) -> dict[str, str]:
    """Finished stage → sha256 of its checkpoint."""
    lifecycle: dict[str, Any] = json.loads((output / "lifecycle.json").read_text())
    return {stage["name"]: stage["checkpoint"]["sha256"] for stage in lifecycle["stages"] if stage.get("checkpoint")}


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", GRAPHS)
def test_every_command_works_on_a_graph(name: str, tmp_path: Path) -> None:
    commands = Commands(GRAPHS[name], tmp_path)
    commands.plan()
    commands.auto()
    commands.tune()
    commands.explain()
    commands.resume()
    commands.audit()
    commands.replay()
