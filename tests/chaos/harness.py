"""Disturb a running lifecycle in every way a machine can, and see whether anything was lost.

`python -m tests.chaos.harness --cases 100 --seed 0` runs the long form. Each case is drawn from its own seed: which
process (or the disk), in which stage, after how long, and what happens to it. Several cases share one lifecycle, one a
stage; at its end every checkpoint's sha256 and every metric point must be what the undisturbed lifecycle has, and
nothing may still run. A case counts where its blow hit: a process died or stood still, or the disk was full.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
STAGES = ("sft", "preferences", "reward", "ppo-1", "ppo-2", "evaluate")
"""Stages that hold models, in order."""
TARGETS = {
    "driver": "xray.cli.runner",
    "stage": "ray::{stage}",
    "learner": "ray::Learner",
    "generator": "ray::Generator",
    "proxy": "ray::WholeModel",
    "pool": "ray::WorkerPool",
    "raylet": "raylet/raylet",
    "gcs": "gcs_server",
    "prefect": "prefect.server.api.server:create_app",
    "supervisor": "",
    "disk": "",
}
ELSEWHERE = {"sft": {"generator"}, "reward": {"generator"}, "preferences": {"learner"}}
"""Targets that a stage does not have."""
DISK_MIB = 512
FULL_SECONDS = 30
"""How long a full disk stays full, where the run does not end by itself before."""
MARK = "CHAOS_MARK"
HIT_SECONDS = 10
"""How long a process may take to die of a signal."""
LEFT_SECONDS = 20
"""How long what a run started may take to end after it."""
ACTIONS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
STALL_SECONDS = 60
"""Without progress for so long a run hangs. On a machine busy with other work its start alone may take as long."""
OVERRIDES = (
    "runtime.snapshot_every=1",
    "runtime.retries=3",
    "runtime.retry_delay_s=0.5",
    "runtime.restarts=10",
    f"runtime.stall_timeout_s={STALL_SECONDS}",
)
LIMIT_SECONDS = 2400
APPEAR_SECONDS = 300.0
"""How long the target of a case may take to start, also again after the blow before, while its stage goes on."""
MAX_DELAY_SECONDS = 4.0
"""From then on, to the blow: a tiny stage is not much longer."""
TIMINGS = ("seconds/", "speed/")
"""Metrics that measure the machine: their points must be there, their values may differ."""


@dataclass(frozen=True)
class Case:
    seed: int
    target: str
    action: str
    stage: str
    delay_s: float


@dataclass(frozen=True)
class Blow:
    """What became of a case."""

    case: Case
    hit: bool
    """Whether a process died, or stood still, or there was no room left. Else nothing was disturbed."""
    what: str

    def __str__(self) -> str:
        return f"{'hit' if self.hit else 'MISSED'} {self.case}: {self.what}"


def draw(seed: int, stage: str) -> Case:
    """The case of `seed`, in `stage`."""
    rng = random.Random(seed)
    target = rng.choice(sorted(TARGETS.keys() - ELSEWHERE.get(stage, set())))
    if target == "disk":
        return Case(seed, target, "fill", stage, rng.uniform(0.0, MAX_DELAY_SECONDS))
    # A stopped process is only noticed by the missing progress, which takes a while: fewer of these.
    action = rng.choices(sorted(ACTIONS), weights=[3, 1, 2])[0]
    return Case(seed, target, action, stage, rng.uniform(0.0, MAX_DELAY_SECONDS))


@dataclass(frozen=True)
class Lifecycle:
    """What is disturbed."""

    config: str = "configs/tiny.yaml"
    overrides: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of the environment."""
    stages: tuple[str, ...] = STAGES
    """In order; each of them is struck, `blows` times."""
    blows: int = 1
    targets: Mapping[str, str] = field(default_factory=lambda: TARGETS)
    draw: Callable[[int, str], Case] = draw
    """(seed, stage) → a case."""
    moment: Callable[[Path, str], str | None] = lambda output, stage: ""
    """(output, stage) → what makes this a moment for a blow whose delay is over; None: it has to wait."""


TINY = Lifecycle()
CONCURRENT = Lifecycle(overrides=("evaluate.heldout_reward_model=0.5",))
"""That of the long form: two reward models train at the same time, and a blow meets either."""


@dataclass(frozen=True)
class Command:
    """The real command on a tiny lifecycle, in `output`."""

    output: Path
    lifecycle: Lifecycle
    mark: str
    """In the environment of all its processes."""

    @property
    def log(self) -> Path:
        return self.output.parent / f"{self.output.name}.log"

    def start(self) -> subprocess.Popen[bytes]:
        hidden = ("PREFECT_", "RAY_", "MLFLOW_", "XRAY_")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
        environment |= {MARK: self.mark, **self.lifecycle.variables}
        line = [sys.executable, "-m", "xray.cli.main", "run", self.lifecycle.config, "--output", str(self.output)]
        line += [part for override in OVERRIDES + self.lifecycle.overrides for part in ("--set", override)]
        with self.log.open("ab") as log:
            return subprocess.Popen(line, cwd=ROOT, env=environment, stdout=log, stderr=log)


def run(output: Path, cases: list[Case], lifecycle: Lifecycle = TINY) -> list[Blow]:
    """One lifecycle under `cases`, in the order of their stages; returns what became of each.

    Raises:
        RuntimeError: the command failed in a way its user would not just repeat, or left a process behind.
        TimeoutError: it did not come to an end.
    """
    output.mkdir(parents=True)
    small = any(case.target == "disk" for case in cases) and os.geteuid() == 0
    if small:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", output], check=True)
    try:
        return _run(Command(output, lifecycle, uuid.uuid4().hex), cases)
    finally:
        if small:
            _onto_the_large_disk(output)


def _run(command: Command, cases: list[Case]) -> list[Blow]:
    output, met = command.output, list[Blow]()
    process = command.start()
    deadline = time.monotonic() + LIMIT_SECONDS
    stages = command.lifecycle.stages
    for case in sorted(cases, key=lambda c: stages.index(c.stage)):
        process = _await_stage(process, command, case.stage, deadline)
        if case.target == "disk":
            time.sleep(case.delay_s)
            met.append(Blow(case, *_fill(process, output)))
            process = _again_if_ended(process, command)
            continue
        process, victim, moment = _await_target(process, command, case)
        hit, what = _strike(victim, case.action) if victim else (False, "no such process")
        met.append(Blow(case, hit, what + moment))
        if case.target == "supervisor" and case.action != "kill":
            if case.action == "stop":
                time.sleep(1)
                process.send_signal(signal.SIGCONT)
            else:
                process.wait(timeout=60)
    while True:
        process = _again_if_ended(process, command)
        if process.poll() == 0:
            break
        if time.monotonic() > deadline:
            process.kill()
            raise TimeoutError(f"{output}: not finished after {LIMIT_SECONDS} s; met {met}")
        time.sleep(0.2)
    none_left(command.mark)
    return met


def _strike(victim: psutil.Process, action: str) -> tuple[bool, str]:
    """(whether it hit, what was seen)."""
    try:
        victim.send_signal(ACTIONS[action])
    except psutil.Error:
        return False, f"{victim.pid} was gone already"
    try:
        deadline = time.monotonic() + HIT_SECONDS
        while time.monotonic() < deadline:
            # A dead process that its parent has not asked for yet is a zombie.
            status = victim.status()
            if status == psutil.STATUS_ZOMBIE:
                return True, f"{victim.pid} died"
            if action == "stop" and status == psutil.STATUS_STOPPED:
                return True, f"{victim.pid} stood still"
            time.sleep(0.02)
    except psutil.NoSuchProcess:
        return True, f"{victim.pid} died"
    return False, f"{victim.pid} lived on"


def _fill(process: subprocess.Popen[bytes], output: Path) -> tuple[bool, str]:
    """Leave no room on the run's disk, until the run has ended or FULL_SECONDS are over; then make room again. Returns
    whether it was full while the run was at work, and what was seen."""
    if not os.path.ismount(output):
        return False, "left out, since only root can give the run a disk of its own"
    at_work = process.poll() is None
    filler = output / "filler"
    try:
        with filler.open("wb", buffering=0) as file:
            for size in (1 << 20, 4096, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
        process.wait(FULL_SECONDS)
        return at_work, f"ended with {process.returncode}"
    except subprocess.TimeoutExpired:
        return True, "held out"
    finally:
        filler.unlink()


def _onto_the_large_disk(output: Path) -> None:
    copy = output.with_name(f"{output.name}.copy")
    shutil.copytree(output, copy, symlinks=True)
    subprocess.run(["umount", "--lazy", output], check=True)
    output.rmdir()
    copy.rename(output)


def none_left(mark: str, seconds: float = LEFT_SECONDS) -> None:
    """Raises RuntimeError where a process with `mark` outlives its run by so long."""
    deadline = time.monotonic() + seconds
    while left := [p for p in psutil.process_iter() if _environment(p).get(MARK) == mark]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"left behind: {[' '.join(_command(p)) for p in left]}")
        time.sleep(0.2)


def _again_if_ended(process: subprocess.Popen[bytes], command: Command) -> subprocess.Popen[bytes]:
    """A command that was killed or interrupted, or had no room, is given again by its user, once for each time."""
    code = process.poll()
    if code is None or code == 0:
        return process
    no_room = os.path.ismount(command.output) and "No space left" in command.log.read_text()
    if code not in (-signal.SIGKILL, 130) and not no_room:
        raise RuntimeError(f"{command.output}: the command ended with {code}; see {command.log}")
    time.sleep(4)
    return command.start()


def _await_stage(
    process: subprocess.Popen[bytes], command: Command, stage: str, deadline: float
) -> subprocess.Popen[bytes]:
    """Wait until `stage` is being worked on (or over)."""
    log = command.output / "logs" / stage / "stage.log"
    while not log.exists() and time.monotonic() < deadline and process.poll() != 0:
        process = _again_if_ended(process, command)
        time.sleep(0.1)
    return process


def _await_target(
    process: subprocess.Popen[bytes], command: Command, case: Case
) -> tuple[subprocess.Popen[bytes], psutil.Process | None, str]:
    """The target of `case`, and what `Lifecycle.moment` said: up for `delay_s` where its stage takes so long, else when
    the stage began to end. None where it did not come up in time, or not before the stage after it."""
    deadline = time.monotonic() + APPEAR_SECONDS
    due, seen = 0.0, None
    while time.monotonic() < deadline:
        process = _again_if_ended(process, command)
        is_over = process.poll() == 0 or _is_over(command, case.stage)
        if (found := _find(process, command, case)) is None:
            # A worker that is about to leave still takes the blow, where it is the one seen before.
            due, seen = 0.0, None
        elif seen is None or found.pid != seen.pid:
            due, seen = time.monotonic() + case.delay_s, found
        if found is not None and (is_over or time.monotonic() >= due):
            moment = command.lifecycle.moment(command.output, case.stage)
            if moment is not None:
                return process, found, moment
        if is_over:
            break
        time.sleep(0.05)
    return process, None, ""


def _is_over(command: Command, stage: str) -> bool:
    """Whether a later stage has begun."""
    stages = command.lifecycle.stages
    later = stages[stages.index(stage) + 1 :]
    return any((command.output / "logs" / name / "stage.log").exists() for name in later)


def _find(supervisor: subprocess.Popen[bytes], command: Command, case: Case) -> psutil.Process | None:
    """The process of this run that the case is about."""
    try:
        root = psutil.Process(supervisor.pid)
        if case.target == "supervisor":
            return root
        pattern = command.lifecycle.targets[case.target].format(stage=case.stage)
        return next((p for p in root.children(recursive=True) if pattern in " ".join(_command(p))), None)
    except psutil.Error:
        return None


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


def outcome(output: Path) -> dict[str, Any]:
    """What must be the same, however often the run was disturbed."""
    import mlflow
    from mlflow.entities import ViewType

    content = json.loads((output / "lifecycle.json").read_text())
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{output / 'mlflow.db'}")
    parent = client.get_run(content["run_id"])
    query = f"tags.`mlflow.parentRunId` = '{content['run_id']}'"
    children = client.search_runs([parent.info.experiment_id], query, run_view_type=ViewType.ALL)
    points: dict[Any, tuple[float, ...]] = {}
    for run in children:
        stage = run.data.tags["xray.stage"]
        for name in run.data.metrics:
            for m in client.get_metric_history(run.info.run_id, name):
                where = (stage, name, m.step)
                points[where] = (*points.get(where, ()), 0.0 if name.startswith(TIMINGS) else m.value)
    return {
        "status": content["status"],
        "checkpoints": {s["name"]: s["checkpoint"]["sha256"] for s in content["stages"]},
        "evaluation": content["evaluation"],
        "mlflow_status": [parent.info.status, *sorted(run.info.status for run in children)],
        "mlflow_runs": sorted(run.data.tags["xray.stage"] for run in children),
        "points": points,
        "snapshots_left": [str(p) for p in (output / "snapshots").glob("*")],
    }


def differences(expected: dict[str, Any], got: dict[str, Any]) -> list[str]:
    """What is not as it should be, in words."""
    found = [
        f"{name}: {got[name]} instead of {expected[name]}"
        for name in expected
        if name != "points" and got[name] != expected[name]
    ]
    missing = sorted(expected["points"].keys() - got["points"].keys())
    extra = sorted(got["points"].keys() - expected["points"].keys())
    other = [w for w in expected["points"].keys() & got["points"].keys() if expected["points"][w] != got["points"][w]]
    for name, places in (("missing", missing), ("extra", extra), ("different or doubled", sorted(other))):
        if places:
            found.append(f"{len(places)} metric points {name}, first {places[0]}")
    return found


def storms(lifecycle: Lifecycle, output: Path, num_cases: int, done: int, seed: int) -> tuple[int, int, int]:
    """Lifecycles under blows until `num_cases` of these have hit, each beside the undisturbed one; prints what became
    of them. Returns (blows that hit, blows, lifecycles that lost something).

    Args:
        done: go on after so many cases.
    """
    output.mkdir(parents=True, exist_ok=True)
    calm = output / "calm"
    if not (calm / "lifecycle.json").exists():
        run(calm, [], lifecycle)
    expected, bad, hits = outcome(calm), 0, done
    # A target that does not come up in its stage is no reason to go on for ever.
    while hits < num_cases and done < 3 * num_cases:
        stages = (lifecycle.stages * lifecycle.blows)[: num_cases - hits]
        cases = [lifecycle.draw(seed * 1_000_003 + done + i, stage) for i, stage in enumerate(stages)]
        begin = time.monotonic()
        storm = output / f"storm-{done}"
        met: list[Blow] = []
        try:
            met = run(storm, cases, lifecycle)
            found = differences(expected, outcome(storm))
        except (OSError, RuntimeError, TimeoutError) as error:
            found = [str(error)]
        done += len(cases)
        hits += sum(blow.hit for blow in met)
        bad += bool(found)
        print(f"{hits}/{num_cases} blows hit, {time.monotonic() - begin:.0f} s: {found or 'nothing lost'}")
        print("\n".join(f"    {line}" for line in met), flush=True)
    print(f"{hits} of {done} blows hit; {bad} lifecycles lost something", flush=True)
    return hits, done, bad


def nothing_is_lost(calm: dict[str, Any], tmp_path: Path, cases: list[Case]) -> None:
    """A lifecycle under `cases` ends as the calm one did."""
    met = run(tmp_path / "storm", cases)
    log = (tmp_path / "storm.log").read_text()
    (tmp_path / "blows.txt").write_text("\n".join(map(str, met)))
    said = "\n".join([*map(str, met), log])
    assert differences(calm, outcome(tmp_path / "storm")) == [], said
    # Some processes heed SIGTERM without ending.
    assert sum(blow.hit for blow in met) >= len(cases) * 2 // 3, said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--done", type=int, default=0, help="go on after so many of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "chaos")
    options = parser.parse_args()
    hits, _, bad = storms(CONCURRENT, options.output, options.cases, options.done, options.seed)
    sys.exit(1 if bad or hits < options.cases else 0)


if __name__ == "__main__":
    main()
