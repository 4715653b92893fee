"""Tests that one worker runs after each other. xdist's own groups are lost with pytest 9.2, which does not read the ids
that xdist 3.8 writes: each test then goes to whoever is free, and what a module starts is started twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xdist.scheduler import LoadScopeScheduling


class GroupScheduling(LoadScopeScheduling):
    """Groups in the order of their tests.

    Args:
        group_of: (file, function) → the group.
    """

    def __init__(self, config: Any, log: Any, group_of: Callable[[str, str], str]) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False
        self._group_of = group_of

    def _split_scope(self, nodeid: str) -> str:
        path, _, name = nodeid.partition("::")
        return self._group_of(path.rpartition("/")[2], name.partition("[")[0])
