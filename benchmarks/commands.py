"""Processor time of commands that compute nothing.

    python -m benchmarks.commands [OUTPUT]     OUTPUT: of an `xray run configs/tiny.yaml` that ended, to run it again

The first call of each is not counted: it writes byte code, and remembers the syntax of files.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile

from benchmarks.machine import machine, spread, table

COMMANDS = ("--help", "", "lineage --help", "status --help", "run configs/tiny.yaml --explain")
CALLS = 5
CALL = "import sys; sys.argv[0] = 'xray'; from xray.cli.main import main; main()"


def seconds(line: list[str]) -> float:
    """Processor time of a call and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", CALL, *line], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    print(machine())
    rows = []
    with tempfile.TemporaryDirectory() as output:
        again = [f"run configs/tiny.yaml --output {path}" for path in sys.argv[1:2]]
        for command in (*COMMANDS, *again):
            line = command.split() + (["--output", f"{output}/none"] if "--explain" in command else [])
            seconds(line)
            rows.append((f"`xray {command}`".replace(" `", "`"), spread([seconds(line) for _ in range(CALLS)], "s", 2)))
    table(("command", "processor time"), rows)


if __name__ == "__main__":
    main()
