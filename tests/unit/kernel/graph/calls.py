"""Calls of stages for tests of graphs, and what their configs say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import xray
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.graph.handles import Handle


def brevity(prompts: list[str], replies: list[str]) -> list[float]:
    return [-float(len(reply)) for reply in replies]


def other(prompts: list[str], replies: list[str]) -> list[float]:
    return [0.0 for _ in replies]


def parts(**data: Any) -> tuple[Handle, Handle, Handle]:
    """(data, base, a reward model)."""
    prompts, base = xray.prepare(source="x.jsonl", **data), xray.base(model="x")
    return prompts, base, xray.reward_model(base, data=xray.preferences(source="dataset", path="y.jsonl"))


def refused(act: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        act()
    assert "\n" not in str(caught.value)
    return str(caught.value)


DEFAULTS = {"when": None, "timeout_s": 300.0, "retries": 2, "uncertainty": 0.5}


def terms(handle: Handle) -> list[dict[str, Any]]:
    assert handle.call is not None
    return [
        {name: value for name, value in term.items() if name not in DEFAULTS or value != DEFAULTS[name]}
        for term in handle.call.config_json()["rewards"]
    ]
