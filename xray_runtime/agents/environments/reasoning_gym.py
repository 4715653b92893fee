"""Tasks of the package reasoning-gym, each answered by one reply: a dataset file, and an environment that scores.

    write_items("sums.jsonl", "chain_sum", range(2000), max_terms=2)

    def sums():
        return from_reasoning_gym()()

    data = xray.prepare(source="sums.jsonl", columns=["item"])
    policy = xray.ppo(sft, prompts=data, environment={"path": sums})

Items are drawn by seed + index: item 1 of seed 42 is item 0 of seed 43. So disjoint sets are ranges of indices with one
seed. Questions still repeat; a dataset splits its file by question.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from xray_runtime.methods.common.environment_protocol import Environment, Step
from xray_runtime.rewards.source import described

COLUMN, OF_ALL = "item", ("task", "seed", "size", "config")
EVALUATES = "its score would run the policy's reply as Python"
HASHES = "its items depend on PYTHONHASHSEED"
REFUSED = {
    "composite": "it holds items of any other task",
    "intermediate_integration": EVALUATES,
    "isomorphic_strings": HASHES,
    "knight_swap": HASHES,
    "polynomial_multiplication": EVALUATES,
    "ransom_note": HASHES,
    "simple_integration": EVALUATES,
    "word_ladder": HASHES,
}
"""Task → why it is not supported."""
ARITHMETIC, ROWS = re.compile(r"(?!.*\*\*)[\d+\-*/() ]*"), re.compile(r"[\d\-\[\], \n]*")
SAFE = {
    "binary_matrix": ROWS,
    "countdown": ARITHMETIC,
    "n_queens": re.compile(r"[Q_\[\]'\", \n]*"),
    "puzzle24": ARITHMETIC,
    "spiral_matrix": ROWS,
    "string_insertion": re.compile(r"[A-E\[\]'\", ]*"),
}
"""Task whose score runs a reply as Python → pattern of safe replies. All others are wrong."""


def write_items(
    path: str | Path,
    task: str,
    indices: range,
    seed: int = 0,
    reply: Callable[[Mapping[str, Any]], str] = lambda item: str(item["answer"]),
    **config: Any,
) -> int:
    """Write items as a .jsonl file of `prompt`, `completion` and `item` (the data for the score), without repeated
    questions. Returns the number of rows.

    Args:
        task: its name in reasoning-gym, such as `chain_sum`.
        reply: item → the completion; by default its answer.
        config: the task's own settings.

    Raises:
        ValueError: the package is not installed, there is no such task or setting, or it is not supported.
    """
    if not indices or indices[0] < 0 or indices[-1] < 0:
        raise ValueError(f"indices = {indices} is not allowed: must be a range of at least one index, none negative")
    named = {"task": task, "seed": seed, "size": max(indices) + 1, "config": config}
    items = _items(json.dumps(named))
    rows: dict[str, str] = {}
    for index in indices:
        item = items[index]
        known = named | {"index": index, "answer": str(item["answer"])}
        row = {"prompt": item["question"], "completion": reply(item), COLUMN: known}
        rows.setdefault(item["question"], json.dumps(row) + "\n")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(rows.values()), encoding="utf-8")
    return len(rows)


def from_reasoning_gym(parse: Callable[[str], str | None] = str.strip) -> Callable[[], Environment]:
    """A factory of environments that score one reply and end.

    The reward is reasoning-gym's `score_answer`: 1 for the answer, in most tasks less for a text that contains it.
    `info["solved"]` only counts 1. A reply that cannot be scored gets 0.

    Args:
        parse: reply → its answer; None if it has none.
    """
    return partial(_ReasoningGym, parse)


class _ReasoningGym:
    def __init__(self, parse: Callable[[str], str | None]) -> None:
        self._parse = parse

    def reset(self, task: Mapping[str, Any], seed: int) -> None:
        named = task.get(COLUMN)
        if not isinstance(named, dict) or set(named) != {*OF_ALL, "index", "answer"}:
            raise ValueError(f"{COLUMN} is {named!r}: must be the column that write_items wrote (data.columns)")
        self._items = _items(json.dumps({name: named[name] for name in OF_ALL}))
        self._safe = SAFE.get(named["task"])
        # Not from the dataset, which is not trusted: scores run parts of an item as Python.
        self._item = self._items[named["index"]]
        if self._item["question"] not in task["prompt"] or str(self._item["answer"]) != named["answer"]:
            raise ValueError(f"{COLUMN} {named} differs here: was it written with another version of reasoning-gym?")

    def step(self, reply: str) -> Step:
        answer = self._parse(reply)
        if answer is None or (self._safe is not None and not self._safe.fullmatch(answer)):
            return Step(terminated=True, info={"solved": 0})
        try:
            score = float(self._items.score_answer(answer, self._item))
        except Exception as error:  # of unexpected text
            return Step(terminated=True, info={"solved": 0, "score_error": described(error)})
        return Step(reward=score, terminated=True, info={"solved": int(score >= 1)})


@lru_cache(maxsize=64)
def _items(named: str) -> Any:
    """The items of the JSON {"task", "seed", "size", "config"}."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError("reasoning-gym is not installed: pip install 'xray-rlhf[reasoning-gym]'") from error
    values = json.loads(named)
    task = values["task"]
    if task in REFUSED:
        raise ValueError(f"task = {task!r} is not allowed: {REFUSED[task]}")
    if task not in DATASETS:
        raise ValueError(f"task = {task!r} is not allowed: reasoning-gym has {', '.join(sorted(DATASETS))}")
    try:
        return reasoning_gym.create_dataset(task, seed=values["seed"], size=values["size"], **values["config"])
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"{task}: reasoning-gym refuses the settings {values['config']} ({error})") from error
