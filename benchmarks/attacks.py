"""The table of attacks on what the nightly flow learns from: what came of each.

    python -m benchmarks.attacks

The attacks are those of tests/unit/lineage/attacks.py, which the tests try too.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.machine import table
from tests.unit.lineage.attacks import (
    BEFORE_A_NIGHT,
    ON_DISK,
    before_a_night,
    on_disk,
    poisonings,
    read_by_a_night,
    sent,
    two_segments,
)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        found = [
            on_disk(attack, two_segments(root / f"run-{number}"), two_segments(root / f"other-{number}"))
            for number, attack in enumerate(ON_DISK)
        ]
        found += [
            read_by_a_night(attack, before_a_night(root / f"night-{number}" / "run"))
            for number, attack in enumerate(BEFORE_A_NIGHT)
        ]
        found += sent(root / "api")
    table(("attack", "what came of it"), [(one.attack, one.came_of_it.replace(str(root), "")) for one in found])
    print()
    columns = ("poison", "share of what is trained on", "without the rule", "at most")
    table(columns, [(p.attack, f"{p.share:.3f}", f"{p.without:.3f}", f"{p.most:g}") for p in poisonings()])


if __name__ == "__main__":
    main()
