"""The result of an episode, as its agent returns or posts it.

    POST /episodes/ID/reward    {"value": number, "final": true, "info": {name: number}}
                                {"unusable": "reason"}

`value` is added to the reward; `final` ends the episode (default: true). `unusable` says that the episode is complete
but must not be trained on. A Python agent returns a number, or such an object, or None after it has posted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from xray_runtime.errors import shown
from xray_runtime.rewards.source import as_number

FIELDS = ("value", "final", "info", "unusable")
MAX_INFO = 100


@dataclass(frozen=True)
class Posted:
    """An agent's statement about its episode."""

    value: float | None = None
    final: bool = True
    info: dict[str, float] = field(default_factory=dict)
    unusable: str | None = None


def read_posted(given: Any) -> Posted:
    """Check a result.

    Raises:
        ValueError: one line with field, value and what is allowed.
    """
    if not isinstance(given, Mapping):
        return Posted(_number("the reward", given))
    for name in given:
        if name not in FIELDS:
            raise ValueError(f"the result has {shown(name)}: may have {', '.join(FIELDS)}")
    unusable, final, info = given.get("unusable"), given.get("final", True), given.get("info") or {}
    if unusable is not None:
        if not isinstance(unusable, str) or not unusable.strip():
            raise ValueError(f"unusable is {shown(unusable)}: must be a reason")
        return Posted(unusable=unusable)
    if not isinstance(final, bool):
        raise ValueError(f"final is {shown(final)}: must be true or false")
    if not isinstance(info, Mapping) or len(info) > MAX_INFO or not all(isinstance(name, str) for name in info):
        raise ValueError(f"info is {shown(info)}: must be an object of up to {MAX_INFO} numbers")
    numbers = {name: _number(f"info[{name!r}]", value) for name, value in sorted(info.items())}
    return Posted(_number("value", given.get("value")), final, numbers)


def _number(name: str, value: Any) -> float:
    number = None if isinstance(value, bool) else as_number(value)
    if number is None:
        raise ValueError(f"{name} is {shown(value)}: must be a finite number")
    return number
