"""The distinct prompts of a dataset."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xray_runtime.data.pairs import Example, Messages, Pairs
from xray_runtime.data.tokens import Tokens
from xray_runtime.kernel.seeding import derive_seed
from xray_runtime.kernel.store.seal import Seal
from xray_runtime.methods.prepare.config import PROMPT_TOKENS

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.data.tokenizer import Tokenizer

CACHED_ROWS = 1024
"""An iteration reads the same rows several times for each reply, and every read decodes a batch of rows."""


def drawn(stage: Stage[Any, Any], count: int, wanted: int | None, purpose: str = "prompts") -> list[int]:
    """`wanted` of the numbers below `count`, or all (None), in an order that the stage's seed and `purpose` decide."""
    order: list[int] = np.random.default_rng(derive_seed(stage.seed, stage.name, purpose)).permutation(count).tolist()
    return order[:wanted]


class UniquePrompts(Sequence[tuple[Messages, list[int]]]):
    """(messages, token ids) of each distinct prompt of `pairs`, a side of a dataset, that has at most `max_prompt`
    tokens; in order of first appearance, read lazily."""

    def __init__(self, tokenizer: Tokenizer, pairs: Path, max_prompt: int, seal: Seal) -> None:
        self.max_prompt = max_prompt
        self._pairs, self._tokens = Pairs(pairs, Example), Tokens(pairs, Example, tokenizer, seal, read="prompts")
        self._pair = lru_cache(CACHED_ROWS)(self._pairs.__getitem__)
        self.rows = self._tokens.different_prompts(max_prompt)
        """Row of each prompt's first appearance."""
        self.num_too_long = int((self._tokens.prompt_lengths > max_prompt).sum())
        """Number of rows whose prompts do not fit."""
        longest = int(self.lengths.max(initial=1))
        self.room = min(max_prompt, max(PROMPT_TOKENS, 2 ** math.ceil(math.log2(longest))))
        """Tokens that a generator needs for the longest prompt: a context of 100,000 would take all memory for its
        cache. A power of two, so that the sides of a dataset share an engine."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each prompt."""
        found: np.ndarray = self._tokens.prompt_lengths[self.rows]
        return found

    def id(self, index: int) -> str:
        """The id of the row in which a prompt first appears."""
        return str(self._pair(int(self.rows[index])).id)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = int(self.rows[index])
        # A copy: functions of users may change what they are given.
        return copy.deepcopy(self._pair(row).prompt), self._tokens.prompt(row)

    def metrics(self) -> dict[str, float]:
        """Number of prompts that do not fit; empty if all fit."""
        if not self.num_too_long:
            return {}
        counts = {"different": len(self), "too_long": self.num_too_long, "max_tokens": self.max_prompt}
        return {f"prompts/{name}": float(count) for name, count in counts.items()}

    def columns(self, indices: Sequence[int]) -> dict[str, list[Any]]:
        """Column of the dataset → its value where each of these prompts first appears, None if that row lacks it."""
        rows = [json.loads(self._pair(int(self.rows[index])).columns) for index in indices]
        names = sorted({name for row in rows for name in row})
        return {name: [row.get(name) for row in rows] for name in names}
