"""Tasks of the package reasoning-gym that one reply answers: a dataset's file of them, and an environment that scores.

    write_items("sums.jsonl", "chain_sum", range(2000), max_terms=2)

    def sums():
        return from_reasoning_gym()()

    data = xray.prepare(source="sums.jsonl", columns=["item"])
    policy = xray.ppo(sft, prompts=data, environment={"path": sums})

Items are drawn by seed + index: item 1 of seed 42 is item 0 of seed 43. So sets of which none may have what another has
are ranges of indices under one seed. Questions still repeat; a dataset splits its one file by what is asked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from xray_runtime.environments.protocol import Environment, Step
from xray_runtime.rewards.source import described

COLUMN, OF_ALL = "item", ("task", "seed", "size", "config")
EVALUATES = "its score would run what the policy says as Python"
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
"""Task → why there is no environment for it."""
ARITHMETIC, ROWS = re.compile(r"(?!.*\*\*)[\d+\-*/() ]*"), re.compile(r"[\d\-\[\], \n]*")
SAFE = {
    "binary_matrix": ROWS,
    "countdown": ARITHMETIC,
    "n_queens": re.compile(r"[Q_\[\]'\", \n]*"),
    "puzzle24": ARITHMETIC,
    "spiral_matrix": ROWS,
    "string_insertion": re.compile(r"[A-E\[\]'\", ]*"),
}
"""Tasks whose score runs a reply as Python → replies that name and call nothing. Any other is wrong."""


def write_items(
    path: str | Path,
    task: str,
    indices: range,
    seed: int = 0,
    reply: Callable[[Mapping[str, Any]], str] = lambda item: str(item["answer"]),
    **config: Any,
) -> int:
    """Write the items as a .jsonl file of `prompt`, `completion` and `item`, which names what the score needs; items
    whose question came before are left out. Returns the number of rows.

    Args:
        task: its name in reasoning-gym, such as `chain_sum`.
        reply: what a demonstration says to an item; its answer if not given.
        config: the task's own settings.

    Raises:
        ValueError: the package is not installed, there is no such task or setting, or it cannot be scored here.
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

    The reward is reasoning-gym's `score_answer`: 1 for the answer, in most tasks less for a text that holds it among
    others. `info["solved"]` counts 1 alone. A reply that the score cannot read gets 0.

    Args:
        parse: reply → the answer in it, None where it holds none.
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
        # Not taken from the dataset: scores run parts of an item as Python, and a dataset may come from anybody.
        self._item = self._items[named["index"]]
        if self._item["question"] not in task["prompt"] or str(self._item["answer"]) != named["answer"]:
            raise ValueError(f"{COLUMN} {named} is another here: was it written by another version of reasoning-gym?")

    def step(self, reply: str) -> Step:
        answer = self._parse(reply)
        if answer is None or (self._safe is not None and not self._safe.fullmatch(answer)):
            return Step(terminated=True, info={"solved": 0})
        try:
            score = float(self._items.score_answer(answer, self._item))
        except Exception as error:  # of text that a task does not expect
            return Step(terminated=True, info={"solved": 0, "score_error": described(error)})
        return Step(reward=score, terminated=True, info={"solved": int(score >= 1)})


@lru_cache(maxsize=64)
def _items(named: str) -> Any:
    """The items of {"task", "seed", "size", "config"}."""
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
