"""The task `legs` of `benchmarks.environments`: how many legs have so many animals? Items of reasoning-gym.

A module of its own, since environments work in processes that import them by name.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import xray
from xray_runtime.environments.reasoning_gym import from_reasoning_gym, write_items


def items() -> Any:
    """The environment of an item of reasoning-gym."""
    return from_reasoning_gym()()


def legs(directory: Path) -> tuple[xray.Handle, xray.Handle]:
    """(the dataset, a model trained on it)."""
    paths = [directory / f"legs-{number}.jsonl" for number in range(4)]
    for path in paths:
        random_ = random.Random(path.name)
        reply = partial(half_right, random_)
        write_items(path, "leg_counting", range(10_000), reply=reply, min_animals=1, max_animals=1, max_instances=10)
    data = xray.prepare(
        sources=[{"source": str(path)} for path in paths],
        columns=["item"],
        min_chars=1,
        max_chars=400,
        max_prompt_tokens=96,
        heldout_fraction=0.25,
    )
    base = xray.fresh_base(data, vocab_size=384, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=4)
    return data, xray.sft(base, data=data, steps=1500, batch_size=32, max_response_tokens=8, lr=4e-3)


def half_right(random_: random.Random, item: Mapping[str, Any]) -> str:
    """The answer, or a number near it."""
    return str(int(item["answer"]) + random_.choice((0, 0, 0, 0, -2, -1, 1, 2)))
