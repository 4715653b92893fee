"""Which changes of the algorithms' code does no test notice? `make mutants`, with mutmut.

Fails where a change survives that tests/survivors.toml does not list, with why no test can tell it from the code, and
where one is listed that does not survive.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

from mutmut.stats import status_by_exit_code

ROOT = Path(__file__).parents[1]
MUTANTS = ROOT / "mutants" / "xray_runtime"
MUTMUT = Path(sys.executable).with_name("mutmut")
NOTICED = {"killed", "timeout"}
"""Of what mutmut says of a mutant; all else survives, or was not tested."""


def change(mutant: str) -> str:
    """A mutant as people write it: function, line before and line after."""
    shown = subprocess.run([MUTMUT, "show", mutant], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    before, after = ([line[1:].strip() for line in shown.splitlines() if line.startswith(f"{s} ")] for s in "-+")
    function = mutant.removeprefix("xray_runtime.").rpartition("__mutmut_")[0]
    return f"{function}: {' '.join(before)} → {' '.join(after)}"


def main() -> int:
    subprocess.run([MUTMUT, "run", *sys.argv[1:]], cwd=ROOT, check=True)
    codes: dict[str, int | None] = {}
    for file in sorted(MUTANTS.rglob("*.meta")):
        codes |= json.loads(file.read_text(encoding="utf-8"))["exit_code_by_key"]
    survivors = {change(name) for name, code in codes.items() if status_by_exit_code[code] not in NOTICED}
    listed = tomllib.loads((ROOT / "tests" / "survivors.toml").read_text(encoding="utf-8"))
    reasoned = {line for lines in listed.values() for line in lines}
    print(f"{len(codes)} mutants, {len(survivors)} survive, {len(survivors & reasoned)} of them listed")
    for line in sorted(survivors - reasoned):
        print(f"survives, and is not listed: {line}")
    for line in sorted(reasoned - survivors):
        print(f"listed, and does not survive: {line}")
    return int(survivors != reasoned or not codes)


if __name__ == "__main__":
    sys.exit(main())
