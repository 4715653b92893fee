"""Signs of life: how much work this process has done, counted in small parts, for those who watch it from outside.

Any layer calls `part_done` after a micro-batch, a step of generation, or a tensor that was read or written. The
heartbeats of a Workhorse carry the count: a process whose count grows is at work, however long the whole takes.

Some parts are common: every rank of a model does them, in the same order. Of ranks that work together, one with fewer
common parts is behind.
"""

from __future__ import annotations

_parts = 0
_common_parts = 0


def part_done(*, common: bool = False) -> None:
    """Count one more part of the work."""
    global _parts, _common_parts
    _parts += 1
    _common_parts += common


def parts_done() -> int:
    """The number of parts that this process has done."""
    return _parts


def common_parts_done() -> int:
    """The number of common parts that this process has done."""
    return _common_parts
