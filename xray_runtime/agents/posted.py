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

from xray_runtime.kernel.errors import shown
from xray_runtime.rewards.source import MAX_NAMES, METRIC_NAME, as_bounded, must_be_bounded

FIELDS = ("value", "final", "info", "unusable")


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
    if not isinstance(info, Mapping) or len(info) > MAX_NAMES:
        raise ValueError(f"info is {shown(info)}: must be an object of up to {MAX_NAMES} numbers")
    for name in info:
        if not isinstance(name, str) or not METRIC_NAME.fullmatch(name):
            raise ValueError(
                f"info has the name {shown(name)}: must be up to 100 letters, digits, _, - and ., and not begin with - "
                "or ."
            )
    numbers = {name: _number(f"info[{name!r}]", value) for name, value in sorted(info.items())}
    return Posted(_number("value", given.get("value")), final, numbers)


def _number(name: str, value: Any) -> float:
    number = as_bounded(value)
    if number is None:
        raise ValueError(f"{name} is {shown(value)}: {must_be_bounded(value)}")
    return number
