"""Measure the signed log: the time of an entry, of a witness's cosignature, of an audit in full or since the last, and
of a new process that reads it, without and with the state that runs keep of a long one.

python -m benchmarks.evidence [DIRECTORY]     processor time, with elapsed time beside it
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from xray_runtime.kernel.evidence import log
from xray_runtime.kernel.evidence.envelope import Verifier
from xray_runtime.kernel.evidence.log import view
from xray_runtime.kernel.evidence.view import Left
from xray_runtime.kernel.history.audit_check import read_log
from xray_runtime.trust import keys
from xray_runtime.trust.keys import keep_log_state, trusted_keys, trusted_view
from xray_runtime.trust.log import append, choose_witness

SIZES = (100, 1000, 4000)
"""Entries before those that are measured."""
NEW = 100


def milliseconds(work: Callable[[], object], count: int) -> str:
    """Processor time and elapsed time of `work`, divided by `count`, as text."""
    processor, clock = time.process_time(), time.perf_counter()
    work()
    used = time.process_time() - processor, time.perf_counter() - clock
    return " ".join(f"{1e3 * one / count:8.3f}" for one in used)


def write(output: Path, count: int) -> None:
    for number in range(count):
        append(output, Left(note=str(number)), {f"records/{number}/metrics.jsonl": "0" * 64})


def new_process(output: Path) -> None:
    """Read the log as a new process of a stage does before it writes to it."""
    log._tail.cache_clear()
    keys._tail.cache_clear()
    assert view(output).head == trusted_view(output).head


def measure(output: Path, size: int) -> dict[str, str]:
    """Name → cost, for a log of so many entries."""
    write(output, size)
    verifier, head = Verifier(trusted_keys(output)), view(output).head
    costs = {
        "an entry": milliseconds(lambda: write(output, NEW), NEW),
        "reading the whole log": milliseconds(lambda: read_log(output, verifier), 1),
        f"reading it since, {NEW} new entries": milliseconds(lambda: read_log(output, verifier, head), 1),
    }
    costs["a new process reads it"] = milliseconds(lambda: new_process(output), 1)
    keep_log_state(output)
    costs["… with the state that a run has kept"] = milliseconds(lambda: new_process(output), 1)
    choose_witness(output, f"{output}-witness", None, by="benchmark")
    return costs | {"an entry with a witness in a directory": milliseconds(lambda: write(output, NEW), NEW)}


def main(directory: str | None) -> None:
    print(
        f"{'ms of the processor, and of the clock':42} {' '.join(f'after {size} entries'.rjust(21) for size in SIZES)}"
    )
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        columns = [measure(Path(temporary) / str(size), size) for size in SIZES]
    for name in columns[0]:
        print(f"{name:42} {' '.join(column[name].rjust(21) for column in columns)}")


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else None)
