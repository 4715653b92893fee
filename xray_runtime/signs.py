"""Signs of life: how much work this process has done, counted in small parts, for those who watch it from outside.

Any layer calls `part_done` after a micro-batch, a step of generation, or a tensor that was read or written. The
heartbeats of a Workhorse carry the count: a process whose count grows is at work, however long the whole takes.
"""

from __future__ import annotations

_parts = 0


def part_done() -> None:
    """Count one more part of the work."""
    global _parts
    _parts += 1


def parts_done() -> int:
    """The number of parts that this process has done."""
    return _parts
