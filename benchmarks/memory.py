"""The memory of a run by kind of process, at the moment when all processes together hold the most.

    python -m benchmarks.memory [quickstart | tiny | smollm2 | grpo] [--set key.path=value …] [--output runs/memory]

`quickstart`, `tiny` and `smollm2` are the shipped lifecycles, `grpo` is four iterations of the 1.6M policy of
`benchmarks.peers`, each in processes of its own, as a person starts it. Held is what a machine must have: anonymous and
shared memory, a page of several forks counted by its share (PSS). Files that are only mapped (libraries) can be read
again, and are a column of their own. A kind's own peak may be at another moment than that of all.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.machine import machine, table

ROOT = Path(__file__).parents[1]
LOOK_S = 1.0
"""Seconds between looks: each takes the kernel some milliseconds a process."""
KIB_PER_MIB = 1024
PEERS = ["-m", "benchmarks.peers_xray"]
PEERS_OPTIONS = ["1.6M", "natural", "--updates", "17", "--iterations", "4", "--methods", "grpo"]
KINDS = {
    "prefect.server.api": "Prefect's server",
    "xray_runtime.kernel.processes": "reaper",
    "fork_client": "start of a worker",
    "xray.cli.runner": "the run",
    "xray.cli.main": "supervisor of the run",
    "benchmarks.peers_xray": "the script with the workspace",
}
"""Part of a command line → kind of process."""
SERVER = "xray.deployments.fork_server"


@dataclass
class Held:
    """MiB of one or more processes."""

    count: int = 0
    held: float = 0.0
    """Anonymous and shared memory, by share."""
    private: float = 0.0
    shared: float = 0.0
    """The part that other processes hold too."""
    files: float = 0.0
    """Mapped files, by share."""

    def add(self, other: Held) -> None:
        for name in ("count", "held", "private", "shared", "files"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class Peak:
    """The most that all processes held together, and each kind."""

    total: float = 0.0
    kinds: dict[str, Held] = field(default_factory=dict)
    """At the moment of the largest total."""
    own: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Kind → the most that it held at any moment."""

    def look(self, processes: Iterable[psutil.Process]) -> None:
        kinds: dict[str, Held] = defaultdict(Held)
        for process in processes:
            with contextlib.suppress(OSError, psutil.Error, ValueError):  # it ended
                kind, one = kind_of(process), held(process.pid)
                kinds[kind].add(one)
        total = sum(one.held for one in kinds.values())
        for kind, one in kinds.items():
            self.own[kind] = max(self.own[kind], one.held)
        if total > self.total:
            self.total, self.kinds = total, kinds


def held(pid: int) -> Held:
    """Memory of a process. Raises OSError: there is none."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    size = {name: int(rest.split()[0]) / KIB_PER_MIB for name, _, rest in (line.partition(":") for line in lines)}
    share = size["Pss_Anon"] + size["Pss_Shmem"]
    # Private pages are anonymous, but for those that the process wrote into a mapping of its own.
    private = min(share, size["Private_Dirty"])
    return Held(1, share, private, share - private, size["Pss_File"])


def kind_of(process: psutil.Process) -> str:
    """The kind of a process. Raises psutil.Error: it ended."""
    words = process.cmdline()
    command = " ".join(words)
    if not words or process.status() == psutil.STATUS_ZOMBIE:
        return "ended"
    if words[0].startswith("ray::"):
        return command.split("(")[0].strip()
    name = Path(words[0]).name
    if name in ("gcs_server", "raylet"):
        return f"Ray: {name}"
    if SERVER in command:
        # Forks have the command of the first server: they differ by the libraries that they have loaded.
        maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8", errors="replace")
        parts = {"libtorch_cpu": "torch", "/vllm/": "vLLM", "/ray/_raylet": "Ray"}
        found = [name for part, name in parts.items() if part in maps]
        return " + ".join(["fork server", *found])
    return next((kind for part, kind in KINDS.items() if part in command), name)


def watched(command: list[str]) -> tuple[Peak, float]:
    """Run a command to its end: (what it and its descendants held, seconds). Raises SystemExit if it fails."""
    peak, start = Peak(), time.monotonic()
    process = psutil.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        with contextlib.suppress(psutil.Error):
            peak.look([process, *process.children(recursive=True)])
        time.sleep(LOOK_S)
    if process.returncode:
        sys.exit(f"the run ended with exit code {process.returncode}")
    return peak, time.monotonic() - start


def run(work: str, output: Path, changes: list[str]) -> tuple[Peak, float]:
    """Measure `work` with the output directory `output`, which must be new."""
    if work != "grpo":
        options = [option for change in changes for option in ("--set", change)]
        return watched(["-m", "xray.cli.main", "run", f"configs/{work}.yaml", "--output", str(output), *options])
    options = [str(output), *PEERS_OPTIONS]
    # The policy is made first: what counts is GRPO.
    subprocess.run([sys.executable, *PEERS, *options, "--turns", "1"], cwd=ROOT, check=True, stdout=sys.stderr)
    return watched([*PEERS, *options, "--turn", "0"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", nargs="?", choices=("quickstart", "tiny", "smollm2", "grpo"), default="quickstart")
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--output", type=Path, default=Path("runs/memory"))
    options = parser.parse_args()
    if options.work == "grpo" and options.changes:
        sys.exit("--set: not for grpo, which has no config")
    output = options.output.absolute() / options.work
    if output.exists():
        sys.exit(f"--output: {output} exists; remove it first: a stage in its store would not be measured")
    print(machine(), flush=True)
    peak, seconds = run(options.work, output, options.changes)
    print(f"\n{options.work}: {seconds:.0f} s, at most {peak.total:,.0f} MiB held by all processes together\n")
    head = ["process", "number", "held, MiB", "private", "shared", "mapped files", "its own peak"]
    rows = sorted(peak.kinds.items(), key=lambda item: -item[1].held)
    cells = [
        (kind, one.count, *(f"{x:,.0f}" for x in (one.held, one.private, one.shared, one.files, peak.own[kind])))
        for kind, one in rows
    ]
    table(head, cells)


if __name__ == "__main__":
    main()
