"""Inject faults into a running lifecycle, and check that nothing is lost.

`python -m tests.chaos.harness --cases 100 --seed 0` runs the long form. Each case is drawn from its own seed: a target
(a process or the disk), the stage, the delay and the action. Cases share a lifecycle, one per stage. At its end, every
checkpoint's sha256 and every metric point must equal those of an undisturbed baseline, and no process may be left. A
case counts if its fault hit: a process died or stopped, or the disk was full.
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
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from xray_runtime.kernel.cores import load

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
"""Time that the disk stays full, unless the run ends earlier."""
MARK = "CHAOS_MARK"
BASELINE = "baseline"
"""Directory of the undisturbed lifecycle."""
HIT_SECONDS = 10
"""Time for a process to die of a signal."""
LEFT_SECONDS = 20
"""Time for the processes of a run to end after it."""
ACTIONS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
"""Faults to draw from; a case may also ask for "interrupt", as Ctrl-C sends."""
SIGNALS = ACTIONS | {"interrupt": signal.SIGINT}
STALL_SECONDS = 60
"""Time without progress after which a run counts as hung. On a busy machine, the start alone may take this long."""
OVERRIDES = (
    "runtime.snapshot_every=1",
    "runtime.retries=3",
    "runtime.retry_delay_s=0.5",
    "runtime.restarts=10",
    f"runtime.stall_timeout_s={STALL_SECONDS}",
)
LIMIT_SECONDS = 2400
APPEAR_SECONDS = 300.0
"""Time for a case's target to start, or to restart after the previous fault."""
MAX_DELAY_SECONDS = 4.0
"""Longest delay from then to the fault; a tiny stage is not much longer."""
TIMINGS = ("seconds/", "speed/")
"""Metrics that depend on the machine: their points must exist, but their values may differ."""


@dataclass(frozen=True)
class Case:
    seed: int
    target: str
    action: str
    stage: str
    delay_s: float
    damages: str = ""
    """A finished stage of which a bit changes while nothing runs, before the command is repeated."""


@dataclass(frozen=True)
class Fault:
    """The outcome of a case."""

    case: Case
    hit: bool
    """Whether a process died or stopped, or the disk was full; if not, nothing was disturbed."""
    what: str

    def __str__(self) -> str:
        return f"{'hit' if self.hit else 'MISSED'} {self.case}: {self.what}"


def draw(seed: int, stage: str) -> Case:
    """The case of `seed`, in `stage`."""
    rng = random.Random(seed)
    target = rng.choice(sorted(TARGETS.keys() - ELSEWHERE.get(stage, set())))
    if target == "disk":
        return Case(seed, target, "fill", stage, rng.uniform(0.0, MAX_DELAY_SECONDS))
    # A stopped process is only detected by missing progress, which takes a while, so these are drawn less often.
    action = rng.choices(sorted(ACTIONS), weights=[3, 1, 2])[0]
    return Case(seed, target, action, stage, rng.uniform(0.0, MAX_DELAY_SECONDS))


@dataclass(frozen=True)
class Lifecycle:
    """A lifecycle to inject faults into."""

    config: str = "configs/tiny.yaml"
    overrides: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables."""
    stages: tuple[str, ...] = STAGES
    """In order; each gets `faults_per_stage` faults."""
    faults_per_stage: int = 1
    targets: Mapping[str, str] = field(default_factory=lambda: TARGETS)
    draw: Callable[[int, str], Case] = draw
    """(seed, stage) → a case."""
    moment: Callable[[Path, str], str | None] = lambda output, stage: ""
    """(output, stage) → description of the moment; None: the fault must wait, even if its delay is over."""


TINY = Lifecycle()
CONCURRENT = Lifecycle(overrides=("evaluate.heldout_reward_model=0.5",))
"""The lifecycle of the long form: two reward models train at the same time, and a fault may hit either."""


@dataclass(frozen=True)
class Command:
    """The real `xray run` on a tiny lifecycle, in `output`."""

    output: Path
    lifecycle: Lifecycle
    mark: str
    """Value of `MARK` in the environment of all its processes."""

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


def run(output: Path, cases: list[Case], lifecycle: Lifecycle = TINY) -> list[Fault]:
    """Run one lifecycle and inject the faults of `cases`, in the order of their stages; returns the outcomes.

    Raises:
        RuntimeError: the command failed in a way that a user would not simply repeat, or left a process behind.
        TimeoutError: the command did not end.
    """
    output.mkdir(parents=True)
    small = any(case.target == "disk" for case in cases) and os.geteuid() == 0
    if small:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", output], check=True)
    try:
        return _run(Command(output, lifecycle, uuid.uuid4().hex), cases)
    finally:
        if small:
            _move_to_large_disk(output)


def _run(command: Command, cases: list[Case]) -> list[Fault]:
    output, faults = command.output, list[Fault]()
    process = command.start()
    deadline = time.monotonic() + LIMIT_SECONDS
    stages = command.lifecycle.stages
    for case in sorted(cases, key=lambda c: stages.index(c.stage)):
        process = _await_stage(process, command, case.stage, deadline)
        if case.target == "disk":
            time.sleep(case.delay_s)
            faults.append(Fault(case, *_fill(process, output)))
            process = _repeat_if_ended(process, command)
            continue
        process, victim, moment = _await_target(process, command, case)
        hit, what = _inject(victim, case.action) if victim else (False, "no such process")
        faults.append(Fault(case, hit, what + moment))
        if case.target == "supervisor" and case.action != "kill":
            if case.action == "stop":
                time.sleep(1)
                process.send_signal(signal.SIGCONT)
            else:
                process.wait(timeout=60)
        if case.damages:
            process.wait(timeout=60)
            none_left(command.mark)
            _change_a_bit(output, case.damages)
    while True:
        process = _repeat_if_ended(process, command)
        if process.poll() == 0:
            break
        if time.monotonic() > deadline:
            process.kill()
            raise TimeoutError(f"{output}: not finished after {LIMIT_SECONDS} s; faults {faults}")
        time.sleep(0.2)
    none_left(command.mark)
    return faults


def _change_a_bit(output: Path, stage: str) -> None:
    [weights] = output.glob(f"checkpoints/{stage}-*/model.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)


def _inject(victim: psutil.Process, action: str) -> tuple[bool, str]:
    """(whether the fault hit, what happened)."""
    try:
        victim.send_signal(SIGNALS[action])
    except psutil.Error:
        return False, f"{victim.pid} had ended already"
    try:
        deadline = time.monotonic() + HIT_SECONDS
        while time.monotonic() < deadline:
            # A dead process is a zombie until its parent waits for it.
            status = victim.status()
            if status == psutil.STATUS_ZOMBIE:
                return True, f"{victim.pid} died"
            if action == "stop" and status == psutil.STATUS_STOPPED:
                return True, f"{victim.pid} stopped"
            time.sleep(0.02)
    except psutil.NoSuchProcess:
        return True, f"{victim.pid} died"
    return False, f"{victim.pid} survived"


def _fill(process: subprocess.Popen[bytes], output: Path) -> tuple[bool, str]:
    """Fill the run's disk until the run has ended or FULL_SECONDS are over, then free it. Returns (whether it was full
    while the run was active, what happened)."""
    if not os.path.ismount(output):
        return False, "skipped, since only root can mount a disk for the run"
    active = process.poll() is None
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
        return active, f"ended with {process.returncode}"
    except subprocess.TimeoutExpired:
        return True, "survived"
    finally:
        filler.unlink()


def _move_to_large_disk(output: Path) -> None:
    copy = output.with_name(f"{output.name}.copy")
    shutil.copytree(output, copy, symlinks=True)
    subprocess.run(["umount", "--lazy", output], check=True)
    output.rmdir()
    copy.rename(output)


def none_left(mark: str, seconds: float = LEFT_SECONDS) -> None:
    """Raise RuntimeError if a process with `mark` is left after `seconds`, or longer on a busy machine."""
    deadline = time.monotonic() + seconds * load()
    while left := [p for p in psutil.process_iter() if _environment(p).get(MARK) == mark]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"left behind: {[' '.join(_command(p)) for p in left]}")
        time.sleep(0.2)


def _repeat_if_ended(process: subprocess.Popen[bytes], command: Command) -> subprocess.Popen[bytes]:
    """Repeat a command that was killed or interrupted, or ended for lack of disk space, as a user would. It must have
    left no process behind."""
    code = process.poll()
    if code is None or code == 0:
        return process
    disk_full = os.path.ismount(command.output) and "No space left" in command.log.read_text()
    if code not in (-signal.SIGKILL, 130) and not disk_full:
        raise RuntimeError(f"{command.output}: the command ended with {code}; see {command.log}")
    none_left(command.mark)
    return command.start()


def _await_stage(
    process: subprocess.Popen[bytes], command: Command, stage: str, deadline: float
) -> subprocess.Popen[bytes]:
    """Wait until `stage` has begun."""
    log = command.output / "logs" / stage / "stage.log"
    while not log.exists() and time.monotonic() < deadline and process.poll() != 0:
        process = _repeat_if_ended(process, command)
        time.sleep(0.1)
    return process


def _await_target(
    process: subprocess.Popen[bytes], command: Command, case: Case
) -> tuple[subprocess.Popen[bytes], psutil.Process | None, str]:
    """Wait until the target of `case` has run for `delay_s` or its stage ends; returns it with the description of
    `Lifecycle.moment`. The target is None if it did not start in time, or not before the next stage."""
    deadline = time.monotonic() + APPEAR_SECONDS
    due, seen = 0.0, None
    while time.monotonic() < deadline:
        process = _repeat_if_ended(process, command)
        is_over = process.poll() == 0 or _is_over(command, case.stage)
        if (found := _find(process, command, case)) is None:
            # A target that is about to end still counts if it is the one seen before.
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
    """The process of this run that is the target of `case`."""
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


def outcome(output: Path, damaged: Collection[str] = ()) -> dict[str, Any]:
    """The results of a run that faults must not change. The points of `damaged` stages were logged twice."""
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
                where, value = (stage, name, m.step), 0.0 if name.startswith(TIMINGS) else m.value
                if stage not in damaged or value not in points.get(where, ()):
                    points[where] = (*points.get(where, ()), value)
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
    """Differences between two outcomes, as text."""
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


def run_cases(lifecycle: Lifecycle, output: Path, num_cases: int, done: int, seed: int) -> tuple[int, int, int]:
    """Run lifecycles with faults until `num_cases` have hit, and compare each with the baseline; prints the outcomes.

    Returns (faults that hit, faults, lifecycles that lost something).

    Args:
        done: number of cases to skip.
    """
    output.mkdir(parents=True, exist_ok=True)
    baseline = output / BASELINE
    if not (baseline / "lifecycle.json").exists():
        run(baseline, [], lifecycle)
    expected, bad, hits = outcome(baseline), 0, done
    # Targets that never start must not make this loop endless.
    while hits < num_cases and done < 3 * num_cases:
        stages = (lifecycle.stages * lifecycle.faults_per_stage)[: num_cases - hits]
        cases = [lifecycle.draw(seed * 1_000_003 + done + i, stage) for i, stage in enumerate(stages)]
        begin = time.monotonic()
        directory = output / f"faults-{done}"
        faults: list[Fault] = []
        try:
            faults = run(directory, cases, lifecycle)
            found = differences(expected, outcome(directory))
        except (OSError, RuntimeError, TimeoutError) as error:
            found = [str(error)]
        done += len(cases)
        hits += sum(fault.hit for fault in faults)
        bad += bool(found)
        print(f"{hits}/{num_cases} faults hit, {time.monotonic() - begin:.0f} s: {found or 'nothing lost'}")
        print("\n".join(f"    {line}" for line in faults), flush=True)
    print(f"{hits} of {done} faults hit; {bad} lifecycles lost something", flush=True)
    return hits, done, bad


def nothing_is_lost(baseline: dict[str, Any], tmp_path: Path, cases: list[Case], lifecycle: Lifecycle = TINY) -> None:
    """Run a lifecycle with the faults of `cases`, and check that it ends like the baseline."""
    faults = run(tmp_path / "faults", cases, lifecycle)
    log = (tmp_path / "faults.log").read_text()
    (tmp_path / "faults.txt").write_text("\n".join(map(str, faults)))
    lost = differences(baseline, outcome(tmp_path / "faults", [case.damages for case in cases]))
    details = "\n".join([*lost, *map(str, faults), log])
    assert lost == [], details
    # Some processes handle SIGTERM without ending.
    assert sum(fault.hit for fault in faults) >= len(cases) * 2 // 3, details


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--done", type=int, default=0, help="number of cases to skip")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "chaos")
    options = parser.parse_args()
    hits, _, bad = run_cases(CONCURRENT, options.output, options.cases, options.done, options.seed)
    sys.exit(1 if bad or hits < options.cases else 0)


if __name__ == "__main__":
    main()
