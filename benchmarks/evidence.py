"""Measure the signed log of an output directory as it grows: what a new stage pays for it, and what audits read.

    python -m benchmarks.evidence [DIRECTORY] [--lifecycles 10 1000 10000]

Lifecycles are the lines of the log that one of `configs/tiny.yaml` writes, with files that are not there. Milliseconds
of the processor, then of the clock.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.machine import machine, table
from xray_runtime.kernel.evidence import kept_state, log
from xray_runtime.kernel.evidence.envelope import Verifier
from xray_runtime.kernel.evidence.lines import LogRecord
from xray_runtime.kernel.evidence.log import LOG, view
from xray_runtime.kernel.evidence.view import START, Left, Published, RunBegan, RunEnded, SignedEntry
from xray_runtime.kernel.history.audit_check import CheckedLines, read_log
from xray_runtime.kernel.history.graph import CheckpointGraph
from xray_runtime.trust import keys
from xray_runtime.trust.audit.verified import read_baseline, write_record
from xray_runtime.trust.keys import keep_log_state, trusted_keys, trusted_view
from xray_runtime.trust.log import append, choose_witness, sign_line
from xray_runtime.trust.signing import signing_key

STAGES = ("prepare", "base", "sft", "preferences", "reward", "ppo-1", "ppo-2", "evaluate")
NEW = 100


def cost(work: Callable[[], object], count: int = 1) -> str:
    """Processor time and elapsed time of `work`, divided by `count`."""
    processor, clock = time.process_time(), time.perf_counter()
    work()
    used = time.process_time() - processor, time.perf_counter() - clock
    return ", ".join(f"{1e3 * one / count:,.3g}" for one in used)


def lifecycle(number: int) -> Iterator[tuple[SignedEntry, dict[str, str]]]:
    """The entries of one, with their files."""
    sha256 = hashlib.sha256(str(number).encode()).hexdigest()
    yield Left(note="config"), {"config.yaml": sha256}
    facts, tags = {"seed": number, "project": "xray-tiny"}, {"xray.output": "/" * 40}
    run: dict[str, Any] = {"run_id": sha256[:32], "name": "xray-tiny seed 0", "experiment": "xray-tiny", "tracking": ""}
    yield RunBegan(**run, run_directory="", facts=facts, params=sha256, tags=tags), {}
    for stage in STAGES:
        directory = f"{stage}-{sha256[:12]}"
        entry = Published(action="publish", directory=directory, checkpoint=sha256, statement=sha256)
        yield entry, {f"checkpoints/{directory}/manifest.json": sha256}
        yield entry, {f"records/{directory}/{part}-{name}": sha256 for part in ("plots", "parts") for name in range(4)}
    yield RunEnded(run_id=sha256[:32], status="completed"), dict.fromkeys(("lifecycle.json", "report.html"), sha256)


def write(output: Path, first: int, end: int) -> None:
    """Lifecycles, without waiting for the disk after each line."""
    private = signing_key(output)
    with (output / LOG).open("ab") as file:
        previous = view(output).head.sha256 if first else START
        for number in range(first, end):
            for entry, files in lifecycle(number):
                text = sign_line(output, LogRecord, entry, files, private=private, previous=previous)
                file.write(text)
                previous = hashlib.sha256(text).hexdigest()
    # Its checkpoint, too.
    append(output, Left(note="end"))


def add(output: Path, count: int) -> None:
    for number in range(count):
        append(output, Left(note=str(number)), {f"records/{number}/metrics.jsonl": "0" * 64})


def new_process(output: Path) -> None:
    """Read the log as a new process of a stage does before it writes to it."""
    log._tail.cache_clear()
    keys._tail.cache_clear()
    kept_state._NEWEST.clear()
    assert view(output).head == trusted_view(output).head


def stage(output: Path) -> None:
    """The log's part in a stage of a new process: it reads what is there, and adds two entries."""
    new_process(output)
    add(output, 2)
    trusted_view(output)


def since(output: Path) -> None:
    """The log's part in an audit since the last one: that has its lines read, and writes down what the next needs."""
    trusted, graph = trusted_keys(output), CheckpointGraph()
    baseline = read_baseline(output, graph, trusted)
    lines, findings = read_log(output, Verifier(trusted), baseline.checked)
    assert not findings
    assert write_record(output, graph, trusted, baseline, lines) == ""


def measure(output: Path, lifecycles: int) -> dict[str, str]:
    """Name → cost, for a log of so many lifecycles."""
    output.mkdir()
    write(output, 0, lifecycles)
    lines: list[CheckedLines] = []
    verifier = Verifier(trusted_keys(output))
    costs = {"lines": f"{view(output).head.entries:,}", "MB": f"{(output / LOG).stat().st_size / 1e6:,.3g}"}
    costs["an entry"] = cost(lambda: add(output, NEW), NEW)
    costs["a new process reads it, no state kept"] = cost(lambda: new_process(output))
    keep_log_state(output)
    costs["a new process reads it"] = cost(lambda: new_process(output))
    costs["a stage of a new process"] = cost(lambda: stage(output))
    costs["an audit reads it"] = cost(lambda: lines.append(read_log(output, verifier)[0]))
    assert lines[0].folded.view.head == view(output).head
    since(output)
    add(output, NEW)
    costs[f"… since the last, {NEW} new entries"] = cost(lambda: since(output))
    choose_witness(output, f"{output}-witness", None, by="benchmark")
    return costs | {"an entry, with a witness in a directory": cost(lambda: add(output, NEW), NEW)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?")
    parser.add_argument("--lifecycles", type=int, nargs="+", default=[10, 1000, 10_000])
    options = parser.parse_args()
    print(f"{machine()}\n", flush=True)
    with tempfile.TemporaryDirectory(dir=options.directory) as temporary:
        columns = [measure(Path(temporary) / str(count), count) for count in options.lifecycles]
    head = ("ms of the processor, of the clock", *(f"{count:,} lifecycles" for count in options.lifecycles))
    table(head, [(name, *(column[name] for column in columns)) for name in columns[0]])


if __name__ == "__main__":
    main()
